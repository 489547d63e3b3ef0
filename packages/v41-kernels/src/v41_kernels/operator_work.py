"""What an operator has to do at least: bytes over the memory bus and operations of its products.

Every operand counts once, as if nothing that fits on chip were read twice; of a paged pool, only the rows that a call
names. Weights of experts count for those experts that a call can reach.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from v41_config import BoundOperator

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Work:
    """Bytes read and written, and floating-point operations of the matrix products (a product and a sum are two)."""

    bytes_moved: int
    matmul_flops: int

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes_moved + other.bytes_moved, self.matmul_flops + other.matmul_flops)

    @property
    def intensity(self) -> float:
        """Operations of the products for each byte."""
        return self.matmul_flops / self.bytes_moved if self.bytes_moved else 0.0


def operator_work(bound: BoundOperator) -> Work:
    """The work of one operator at the sizes that `bound` has."""
    flops = _PRODUCTS[bound.spec.name](_Shapes(bound)) if bound.spec.name in _PRODUCTS else 0
    return Work(sum(_bytes(bound, name) for name in bound.tensors), 2 * flops)


class _Shapes:
    """Shapes of a bound operator by tensor name."""

    def __init__(self, bound: BoundOperator) -> None:
        self._shapes, self.dims = bound.shapes, bound.dims

    def __getitem__(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def linear(self, x: str, *weights: str) -> int:
        """Multiply-adds of rows of `x` with every row of some weights `[N, K]` (packed ones are half as wide)."""
        rows, width = prod(self[x][:-1]), self[x][-1]
        return sum(rows * self[weight][-2] * width for weight in weights)


_POOL_ROWS: Mapping[str, tuple[str, ...]] = {
    "window_kv": ("slots", "window_slots", "window_indices"),
    "compressed_kv": ("slots", "compressed_slots", "topk_rows"),
    "index_key": ("slots", "index_slots"),
    "state_cache": ("position_ids",),
}
"""The tensors whose elements name rows of a pool."""

_ENTRY_KEYS = 128
"""Index keys in a page of a block table."""


def _bytes(bound: BoundOperator, name: str) -> int:
    tensor = bound.tensors[name]
    pool = name.removesuffix("_scale")
    whole = 2 * tensor.nbytes if tensor.spec.direction == "inout" else tensor.nbytes
    if pool not in _POOL_ROWS:
        return min(whole, _expert_bytes(bound, name, whole))
    rows = sum(prod(bound.shapes[indices]) for indices in _POOL_ROWS[pool] if indices in bound.tensors)
    if (pool == "index_key" and "index_q" in bound.tensors) or "index_wq_b" in bound.tensors:
        rows += bound.dims.get("B", 0) * bound.dims.get("PAGES", 0) * _ENTRY_KEYS
    capacity = prod(tensor.shape[:-1])
    return whole * min(rows, capacity) // capacity if capacity else 0


def _expert_bytes(bound: BoundOperator, name: str, whole: int) -> int:
    """Bytes of the experts that can be reached: no more than there are rows."""
    if "E_local" not in bound.tensors[name].spec.dims:
        return whole
    experts = bound.dims["E_local"]
    rows = bound.dims.get("R", bound.dims.get("T_local", 0) * int(bound.constants.get("num_experts_per_tok", 1)))
    return whole * min(rows, experts) // experts


def _routed(s: _Shapes) -> int:
    rows, width = s["rows"]
    return 3 * rows * width * s["w1"][1]


def _attention(s: _Shapes, entries: int) -> int:
    tokens, heads, width = s["q"]
    return 2 * tokens * heads * width * entries


def _scores(s: _Shapes) -> int:
    tokens, heads, width = s["index_q"]
    return tokens * heads * width * s.dims["PAGES"] * _ENTRY_KEYS


def _grouped(s: _Shapes) -> int:
    return s["o"][0] * s["wo_a"][0] * s["wo_a"][1]


_PRODUCTS: Mapping[str, Callable[[_Shapes], int]] = {
    **dict.fromkeys(
        ("quantized_linear", "quantized_linear_fp4", "quantized_linear_fp32"), lambda s: s.linear("x", "w")
    ),
    **dict.fromkeys(("bf16_linear", "fp32_linear"), lambda s: s.linear("x", "w")),
    "lm_head": lambda s: s.linear("normed", "head_weight"),
    "mhc_mixes": lambda s: s["x_hc"][0] * prod(s["fn"]),
    "q_proj_qr": lambda s: s.linear("x", "wq_a"),
    "q_proj_rope": lambda s: s.linear("qr", "wq_b"),
    "kv_proj_rope": lambda s: s.linear("x", "wkv"),
    "compress_ratio_1": lambda s: s.linear("x", "compressor_wkv"),
    "compress_ratio_2": lambda s: s.linear("x", "compressor_wkv", "compressor_wgate"),
    "compress_pairs": lambda s: s.linear("x", "compressor_wkv", "compressor_wgate"),
    "index_keys": lambda s: s.linear("latent", "index_wk"),
    "index_queries": lambda s: s.linear("qr", "index_wq_b") + s.linear("x", "index_weights_proj"),
    **dict.fromkeys([f"hierarchical_sparse_indexer_{m}" for m in ("c2a_full", "c1a_full", "c1a_reindex")], _scores),
    "sparse_attention": lambda s: _attention(s, s["valid"][1]),
    "window_attention": lambda s: _attention(s, s["window_indices"][1]),
    "selected_attention": lambda s: _attention(s, s["window_indices"][1] + s["topk_rows"][1]),
    "grouped_output": _grouped,
    "o_proj": lambda s: s.linear("u", "wo_b"),
    "gate": lambda s: s.linear("x", "gate_weight"),
    "shared_expert": lambda s: s.linear("x", "shared_w1", "shared_w3") + s["x"][0] * prod(s["shared_w2"]),
    "routed_experts": _routed,
}
"""Multiply-adds of the operators that have products. A composition's are those of its launches."""
