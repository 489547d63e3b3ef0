"""`CapacityPlan`: what a card's memory holds for a context, a number of requests and a layout, and what fits.

Bytes follow from the tables that everything else uses: weights from `weight_table`, caches from `CacheLayout`,
windows from the operators that write them. Activations, compiler heaps and allocator losses are not counted; `reserve`
is the place for them. docs/capacity.md documents every key and assumption.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from pydantic import ByteSize, TypeAdapter, ValidationError

from v41_config.cache_abi import BLOCK_ROWS, CachePool, SourceTokens
from v41_config.cache_layout import CacheLayout
from v41_config.data_types import DATA_TYPE_BYTES
from v41_config.dimensions import model_sizes
from v41_config.errors import CapacityError, LayoutError
from v41_config.model_config import MX_GROUP, ModelConfig
from v41_config.operator_tables import find_operator
from v41_config.operator_tables.attention_stages import MAX_LOGITS_BYTES
from v41_config.parallel_layout import ParallelLayout
from v41_config.weight_table import WEIGHTS, WeightSpec, weight_bytes

JSON_VERSION = 1
"""Raised when a key of `CapacityPlan.to_json` changes its name or meaning."""

DEFAULT_HBM_BYTES = 128 << 30
"""Memory of a card where nothing else is said."""


@dataclass(frozen=True)
class CapacityAssumptions:
    """What a plan supposes beside context, requests and layout.

    Attributes:
        decode_tokens: rows of a request in one decode step: the target and five drafts.
        prefill_tokens: scheduled rows of one prefill step of a DP group.
        bf16_cache: keep window, compressed and index-key rows in BF16 without scales, for comparison.
        bf16_wo_a: keep wo_a decoded to BF16, as the release computes with it, not in FP8 as it is stored.
        engram: count the n-gram memory of a checkpoint that has one.
        max_logits_bytes: budget of the indexer's FP32 scores.
        reserved_bytes: anything else that the card has to hold.
    """

    decode_tokens: int = 6
    prefill_tokens: int = 4096
    bf16_cache: bool = False
    bf16_wo_a: bool = False
    engram: bool = True
    max_logits_bytes: int = MAX_LOGITS_BYTES
    reserved_bytes: int = 0

    def __post_init__(self) -> None:
        for name, least in (("decode_tokens", 1), ("prefill_tokens", 0), ("max_logits_bytes", 0),
                            ("reserved_bytes", 0)):  # fmt: skip
            _require_integer(name, getattr(self, name), least)


@dataclass(frozen=True)
class Fit:
    """The largest value that fits, and what stops the next one."""

    value: int
    limited_by: Literal["hbm", "max_position_embeddings", "int32_rows"]


@dataclass(frozen=True)
class CapacityPlan:
    """Bytes of one card, by section and item.

    Every card of a layout holds the same: `requests` are those of one DP group, whose caches each of its ranks keeps
    whole. A request may grow to `context` tokens.

    Raises:
        CapacityError: context or requests out of range, naming the quantity.
        LayoutError: the layout does not divide the model, or a block table exceeds INT32 rows.
    """

    config: ModelConfig
    layout: ParallelLayout
    context: int
    requests: int
    assumptions: CapacityAssumptions = field(default_factory=CapacityAssumptions)

    def __post_init__(self) -> None:
        longest = self.config.max_position_embeddings
        _require_integer("context", self.context, 1)
        if self.context > longest:
            raise CapacityError("context", self.context, f"at most max_position_embeddings = {longest}")
        _require_integer("requests", self.requests, 1)
        self.layout.check(self.config)
        self._cache_layout  # noqa: B018  raises here rather than in the middle of a report

    @functools.cached_property
    def sections(self) -> Mapping[str, Mapping[str, int]]:
        """Bytes by section (`weights`, `caches`, `communication`, `tables`, `indexer`, `reserve`) and item."""
        return {
            "weights": self._weights(),
            "caches": self._caches(),
            "communication": self._communication(),
            "tables": {"rope": self._rope_tables()},
            # At least one row of scores goes through, whatever the budget.
            "indexer": {"score_budget": max(self.assumptions.max_logits_bytes, self.context * _FP32)},
            "reserve": {"reserved": self.assumptions.reserved_bytes},
        }

    def section_bytes(self, section: str) -> int:
        """Bytes of one section."""
        return sum(self.sections[section].values())

    @property
    def total_bytes(self) -> int:
        """Bytes of the card."""
        return sum(map(self.section_bytes, self.sections))

    @property
    def cache_bytes_per_request(self) -> int:
        """Bytes that one request of `context` tokens keeps on each card of its group."""
        return sum(self._request_caches().values()) // self.requests

    def largest_context(self, hbm_bytes: int = DEFAULT_HBM_BYTES) -> Fit:
        """The longest context that all of `requests` can have; 0 where not even one token fits."""
        longest = self.config.max_position_embeddings
        return self._largest(lambda n: dataclasses.replace(self, context=n), hbm_bytes, longest)

    def most_requests(self, hbm_bytes: int = DEFAULT_HBM_BYTES) -> Fit:
        """The most requests of a DP group that can all have `context` tokens."""
        return self._largest(lambda n: dataclasses.replace(self, requests=n), hbm_bytes, None)

    def to_json(self, hbm_bytes: int = DEFAULT_HBM_BYTES) -> dict[str, Any]:
        """The plan under stable keys (docs/capacity.md)."""
        sections = {
            name: {**items, "total": self.section_bytes(name)} for name, items in self.sections.items()
        }  # fmt: skip
        return {
            "version": JSON_VERSION,
            "layout": {"tp": self.layout.tp, "dp": self.layout.dp, "ep": self.layout.ep},
            "context": self.context,
            "requests": self.requests,
            "assumptions": dataclasses.asdict(self.assumptions),
            **sections,
            "cache_bytes_per_request": self.cache_bytes_per_request,
            "total": self.total_bytes,
            "hbm": hbm_bytes,
            "free": hbm_bytes - self.total_bytes,
            "fits": {
                "largest_context": dataclasses.asdict(self.largest_context(hbm_bytes)),
                "most_requests": dataclasses.asdict(self.most_requests(hbm_bytes)),
            },
        }

    def _weights(self) -> dict[str, int]:
        sizes = {kind.value: nbytes for kind, nbytes in weight_bytes(self.config, self.layout).items()}
        if self.assumptions.bf16_wo_a:
            sizes["attention"] += self._decoding_costs(WEIGHTS["wo_a"], WEIGHTS["wo_a_scale"])
        return sizes | self._engram()

    def _decoding_costs(self, weight: WeightSpec, scale: WeightSpec) -> int:
        """Bytes that a weight takes more in BF16 than in FP8 with its scale."""
        sizes = model_sizes(self.config, self.layout)
        elements, scales = (prod(spec.shape(sizes)) for spec in (weight, scale))
        bf16 = elements * DATA_TYPE_BYTES["bfloat16"]
        stored = elements * DATA_TYPE_BYTES[weight.dtype] + scales * DATA_TYPE_BYTES[scale.dtype]
        return (bf16 - stored) * len(weight.layers.ids(self.config))

    def _engram(self) -> dict[str, int]:
        """Tables in even shares over all ranks, rounded up; projections whole on each (model.md section 20)."""
        engram = self.config.engram if self.assumptions.engram else None
        if engram is None:
            return {"engram_tables": 0, "engram_projections": 0}
        row = engram.head_dim + engram.head_dim // MX_GROUP
        inputs = (engram.max_ngram_size - 1) * engram.n_heads * engram.head_dim
        outputs = (self.config.hc_mult + 1) * self.config.hidden_size
        projection = outputs * inputs + (outputs // MX_GROUP) * (inputs // MX_GROUP)
        norms = 2 * self.config.hc_dim * DATA_TYPE_BYTES["bfloat16"]
        return {
            "engram_tables": -(-sum(engram.num_embeddings) * row // self.layout.ep),
            "engram_projections": len(engram.layer_ids) * (projection + norms),
        }

    @functools.cached_property
    def _cache_layout(self) -> CacheLayout:
        return CacheLayout.for_rank(
            self.config,
            self.layout,
            0,
            requests=self.requests * self.layout.dp,
            context=SourceTokens(self.context),
            step_tokens=SourceTokens(self.assumptions.decode_tokens),
        )

    def _request_caches(self) -> dict[str, int]:
        """Every pool with the blocks that requests keep."""
        held = self._cache_layout
        return {p.name: held.blocks[p.block_table] * self._bytes_of_block(p) for p in held.pools}

    def _caches(self) -> dict[str, int]:
        # A request's rows of one step lie on at most rows // 128 pages beyond those it keeps anyway, so the rows of a
        # prefill step, however they are shared out, need no more than this many pages together.
        (window,) = (pool for pool in self._cache_layout.pools if pool.block_table == "window")
        pages = self.assumptions.prefill_tokens // BLOCK_ROWS
        return self._request_caches() | {"window_prefill": pages * self._bytes_of_block(window)}

    def _bytes_of_block(self, pool: CachePool) -> int:
        """One block in every owner layer."""
        nbytes = pool.bytes_per_block
        if self.assumptions.bf16_cache and pool.scale is not None:
            nbytes = prod(pool.scale.block_shape) * pool.group * DATA_TYPE_BYTES["bfloat16"]
        return nbytes * len(pool.owner_layers)

    def _communication(self) -> dict[str, int]:
        """Windows that peers write, retained for the whole forward and used by every layer in turn."""
        layout, decode_rows = self.layout, self.requests * self.assumptions.decode_tokens
        rows = max(self.assumptions.prefill_tokens, decode_rows)
        padded = layout.slab_rows(rows) * layout.tp
        held = model_sizes(self.config, layout)["E_local"]
        # All tokens of the world may choose experts of one rank: each of its choices if it holds that many.
        received = rows * layout.dp * min(self.config.num_experts_per_tok, held)
        within_group, within_world = (padded if layout.tp > 1 else 0), layout.ep > 1
        return {
            "attention_all_gather": self._window("prefill_tp_input_all_gather", ("gathered",), T=within_group),
            "attention_reduce_scatter": self._window(
                "prefill_tp_output_reduce_scatter", ("output_partial",), T=within_group
            ),
            "expert_dispatch": self._window(
                "dispatch",
                ("rows", "row_expert_ids", "row_route_weights", "receive_counts"),
                T=padded,
                R=received,
            )
            * within_world,
            "expert_combine": self._window("return_to_source", ("expert_rows",), T=padded, R=received) * within_world,
            "logits_all_gather": self._window(
                "tp_logits_all_gather", ("gathered",), LOGIT_ROWS=decode_rows if layout.tp > 1 else 0
            ),
        }

    def _window(self, operator: str, tensors: tuple[str, ...], **extents: int) -> int:
        bound = find_operator(operator).bind(self.config, self.layout, **extents)
        return sum(bound.tensors[name].nbytes for name in tensors)

    def _rope_tables(self) -> int:
        """Cosines and sines of every position, for both profiles."""
        capacity = self.config.max_position_embeddings
        one_profile = self._window("materialize_rope_rows", ("freqs_cos", "freqs_sin"), CAPACITY=capacity, T=0)
        return one_profile * len({layer.rope_profile for layer in self.config.layers})

    def _largest(self, planned: Callable[[int], CapacityPlan], hbm_bytes: int, longest: int | None) -> Fit:
        """The largest value whose plan fits: sizes never shrink as it grows, so bisect."""
        _require_integer("hbm", hbm_bytes, 1)

        def fits(value: int) -> bool:
            try:
                return planned(value).total_bytes <= hbm_bytes
            except LayoutError:  # more rows than INT32 names; the layout itself divides, or self were not there
                return False

        low, high = 0, 1
        while high != longest and fits(high):
            low, high = high, high * 2 if longest is None else min(high * 2, longest)
        if high == longest and fits(high):
            return Fit(longest, "max_position_embeddings")
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        try:
            planned(high)
        except LayoutError:
            return Fit(low, "int32_rows")
        return Fit(low, "hbm")


_FP32 = DATA_TYPE_BYTES["float32"]

_SIZE = re.compile(r"[0-9.]+ ?[A-Za-z]+")

_LARGEST_SIZE = 1 << 60


def parse_bytes(text: str, where: str = "size") -> int:
    """A size with its unit, such as `128GiB`, `64GB` or `1000B`: who writes 128 alone does not mean bytes.

    Raises:
        CapacityError: text that is no positive size.
    """
    try:
        # ByteSize ignores what follows the unit.
        size = int(TypeAdapter(ByteSize).validate_python(text)) if _SIZE.fullmatch(text) else 0
    except (ValidationError, OverflowError):
        size = 0
    if not 0 < size <= _LARGEST_SIZE:
        raise CapacityError(where, text, "a size above 0 with its unit, such as 128GiB or 64GB")
    return size


def _require_integer(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise CapacityError(name, value, f"an integer of at least {least}")
    if value > _LARGEST_SIZE:
        raise CapacityError(name, value, f"at most {_LARGEST_SIZE}")
