"""Expands the rules for a config: which tensors a checkpoint of it holds, in which dtype and shape."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from v41_config.model_config import ModelConfig
from v41_loader.errors import TensorCountError, UnknownTensorError
from v41_loader.rules import DTYPE_BYTES, RULES, Layers, Partition, TensorRule, dimension, layer_ids

_INDEX = re.compile(r"(?<=\.)(?:0|[1-9][0-9]{0,8})(?=\.)", re.ASCII)
MAX_TENSORS = 1 << 19
"""Five times those of the release, and as many as an index of the size that is read can name."""

_LAYER, _EXPERT = _PLACEHOLDERS = ("{layer}", "{expert}")


class ExpectedTensor(NamedTuple):
    """One tensor as the config implies it; `dtype` is the safetensors name, `shape` counts stored items."""

    name: str
    rule: TensorRule
    shape: tuple[int, ...]
    layer: int | None
    expert: int | None

    @property
    def dtype(self) -> str:
        return self.rule.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.rule.dtype]

    @property
    def skipped(self) -> bool:
        """Whether text inference leaves this tensor out."""
        return self.rule.partition is Partition.SKIPPED


@functools.cache
def _rules_by_pattern() -> Mapping[str, TensorRule]:
    table = {rule.pattern: rule for rule in RULES}
    assert len(table) == len(RULES), "two rules share a pattern"
    return MappingProxyType(table)


def rule_of(name: str) -> tuple[TensorRule, int | None, int | None] | None:
    """The one rule that a name matches, with its layer and expert id; None for a name that no rule explains.

    Ids are not compared with any config: `layers.999.attn_norm.weight` matches.
    """
    ids = [int(index) for index in _INDEX.findall(name)]
    if len(ids) > len(_PLACEHOLDERS) or "{" in name:
        return None
    placeholders = iter(_PLACEHOLDERS)
    rule = _rules_by_pattern().get(_INDEX.sub(lambda _: next(placeholders), name))
    if rule is None:
        return None
    layer, expert, *_ = [*ids, None, None]
    return rule, layer, expert


def _expert_ids(rule: TensorRule, config: ModelConfig) -> range:
    if _EXPERT not in rule.pattern:
        return range(1)
    if rule.layers is Layers.DRAFTING:
        return range(config.drafting.n_routed_experts if config.drafting else 0)
    return range(config.n_routed_experts)


def _shape(rule: TensorRule, config: ModelConfig, layer: int) -> tuple[int, ...]:
    """Stored items along each dimension; the last item of a tile that a dimension does not fill counts."""
    return tuple(
        -(-dimension(dim, config, layer) // extent) for dim, extent in zip(rule.dims, rule.item_extents, strict=True)
    )


@functools.lru_cache(maxsize=4)
def expected_tensors(config: ModelConfig) -> Mapping[str, ExpectedTensor]:
    """Every tensor of a checkpoint of this config by name, skipped groups included (model.md section 20).

    Raises:
        TensorCountError: more than `MAX_TENSORS`, as a config from an untrusted directory may state.
    """
    count = sum(len(layer_ids(rule.layers, config)) * len(_expert_ids(rule, config)) for rule in RULES)
    if count > MAX_TENSORS:
        raise TensorCountError("config", f"{count} tensors", f"at most {MAX_TENSORS}")
    tensors: dict[str, ExpectedTensor] = {}
    for rule in RULES:
        has_layer = _LAYER in rule.pattern
        for layer in layer_ids(rule.layers, config):
            shape, layer_id = _shape(rule, config, layer), layer if has_layer else None
            before, of_expert, after = rule.pattern.replace(_LAYER, str(layer)).partition(_EXPERT)
            if not of_expert:
                tensors[before] = ExpectedTensor(before, rule, shape, layer_id, None)
                continue
            for expert in _expert_ids(rule, config):
                name = f"{before}{expert}{after}"
                tensors[name] = ExpectedTensor(name, rule, shape, layer_id, expert)
    return MappingProxyType(tensors)


def expected_tensor(config: ModelConfig, name: str) -> ExpectedTensor:
    """One tensor of a checkpoint of this config.

    Raises:
        UnknownTensorError: no rule explains the name, or the config has no such layer or expert.
    """
    found = rule_of(name)
    if found is not None:
        rule, layer, expert = found
        if (layer or 0) in layer_ids(rule.layers, config) and (expert or 0) in _expert_ids(rule, config):
            return ExpectedTensor(name, rule, _shape(rule, config, layer or 0), layer, expert)
    raise UnknownTensorError("tensor", name, "a tensor name that the config has")
