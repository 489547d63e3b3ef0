"""The weight table of v41_config and the sharding rules of v41_loader say the same: names, dtypes, shapes, bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

import pytest

from v41_config import FLASH, FLASH6, TINY, ModelConfig, ParallelLayout
from v41_config.data_types import DATA_TYPE_BYTES
from v41_config.dimensions import model_sizes
from v41_config.weight_table import WEIGHTS, WeightClass, WeightSpec, weight_bytes
from v41_loader.expected_tensors import expected_tensor, expected_tensors
from v41_loader.partition import rank_part
from v41_loader.rules import DTYPE_BYTES, RULES, Partition, TensorGroup, TensorRule

CASES = [(FLASH, ParallelLayout(4, 2)), (FLASH, ParallelLayout(8, 1)), (FLASH6, ParallelLayout(2, 4)),
         (TINY, ParallelLayout(4, 1)), (TINY, ParallelLayout())]  # fmt: skip
DTYPES = {"BF16": "bfloat16", "F32": "float32", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "I8": "int8"}
LOADED = {rule.pattern: rule for rule in RULES if rule.partition is not Partition.SKIPPED}


def loaded_bytes(config: ModelConfig, layout: ParallelLayout, rank: int) -> dict[str, int]:
    """Bytes of each class that a rank loads, from the loader's rules alone."""
    totals: dict[str, int] = {}
    for tensor in expected_tensors(config).values():
        part = rank_part(tensor, config, layout, rank)
        if part is not None:
            group = tensor.rule.group.name
            totals[group] = totals.get(group, 0) + math.prod(part.shape) * DTYPE_BYTES[tensor.rule.dtype]
    return totals


def differences(
    weights: Mapping[str, WeightSpec], rules: Mapping[str, TensorRule], config: ModelConfig, layout: ParallelLayout
) -> list[str]:
    """Patterns that one table lacks, or that differ in dtype, class, layers or a rank's shape."""
    table = {weight.checkpoint: weight for weight in weights.values()}
    found = sorted(set(table) ^ set(rules))
    sizes, last = model_sizes(config, layout), layout.world_size - 1
    for pattern in set(table) & set(rules):
        weight, rule = table[pattern], rules[pattern]
        layer, expert = weight.layers.ids(config)[0], layout.expert_range(config, last)[0]
        tensor = expected_tensor(config, pattern.format(layer=layer, expert=expert))
        part = rank_part(tensor, config, layout, last)
        same = (
            weight.dtype == DTYPES[rule.dtype]
            and weight.weight_class.name == rule.group.name
            and weight.layers.value == rule.layers.value.replace("every backbone layer", "every layer")
            and part is not None
            and weight.shape(sizes) == part.shape
        )
        found += [] if same else [pattern]
    return found


@pytest.mark.parametrize(("config", "layout"), CASES)
def test_both_tables_agree(config: ModelConfig, layout: ParallelLayout) -> None:
    assert differences(WEIGHTS, LOADED, config, layout) == []


@pytest.mark.parametrize(("config", "layout"), CASES)
def test_both_give_every_class_the_same_bytes(config: ModelConfig, layout: ParallelLayout) -> None:
    planned = {kind.name: nbytes for kind, nbytes in weight_bytes(config, layout).items()}
    assert loaded_bytes(config, layout, layout.world_size - 1) == planned


def test_classes_and_item_sizes_are_the_same() -> None:
    assert (
        {kind.name for kind in WeightClass}
        == {rule.group.name for rule in LOADED.values()}
        <= {group.name for group in TensorGroup}
    )
    for name, dtype in DTYPES.items():
        assert DTYPE_BYTES[name] == DATA_TYPE_BYTES[dtype]


def changed(operand: str, **values: object) -> Iterable[tuple[str, WeightSpec]]:
    return {**WEIGHTS, operand: dataclasses.replace(WEIGHTS[operand], **values)}.items()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("operand", "values"),
    [
        ("wq_b", {"dims": ("H*HEAD_DIM", "Q_LORA")}),
        ("w2", {"dims": ("D", "I")}),
        ("wo_b_scale", {"dims": ("D/MX", "O_GROUPS*O_LORA/MX")}),
        ("gate_bias", {"dtype": "bfloat16"}),
        ("index_wk", {"layers": WEIGHTS["index_wq_b"].layers}),
        ("norm", {"weight_class": WeightClass.HEAD}),
    ],
)
def test_a_difference_is_found(operand: str, values: dict[str, object]) -> None:
    table = dict(changed(operand, **values))
    assert differences(table, LOADED, FLASH, ParallelLayout(4, 2)) == [WEIGHTS[operand].checkpoint]


def test_a_missing_tensor_is_found() -> None:
    table = {name: weight for name, weight in WEIGHTS.items() if name != "q_norm"}
    assert differences(table, LOADED, TINY, ParallelLayout()) == ["layers.{layer}.attn.q_norm.weight"]
