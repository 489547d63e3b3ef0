"""How the tables spell an operand: by direction, with the dimensions behind the type."""

from __future__ import annotations

import dataclasses

from v41_config.data_types import DataType
from v41_config.dimensions import Dim
from v41_config.operator_spec import ConstantSpec, CountSpec, Direction, TensorSpec
from v41_config.weight_table import WEIGHTS

NUM_TOKENS = CountSpec("num_tokens", limit="T")
"""Valid packed rows; the rest is padding."""

EPS = ConstantSpec("eps", "rms_norm_eps")

HC_CONSTANTS = (EPS, ConstantSpec("hc_eps", "hc_eps"), ConstantSpec("hc_sinkhorn_iters", "hc_sinkhorn_iters"))

SWIGLU_LIMIT = ConstantSpec("swiglu_limit", "swiglu_limit")


def reads(name: str, dtype: DataType, *dims: Dim) -> TensorSpec:
    """An operand that is read."""
    return TensorSpec(name, dims, dtype, "in")


def writes(name: str, dtype: DataType, *dims: Dim) -> TensorSpec:
    """A destination."""
    return TensorSpec(name, dims, dtype, "out")


def updates(name: str, dtype: DataType, *dims: Dim) -> TensorSpec:
    """An operand that is read and written."""
    return TensorSpec(name, dims, dtype, "inout")


def weights(*operands: str, rename: str = "") -> tuple[TensorSpec, ...]:
    """Weights of the table by operand name, each quantised one with its scale.

    Routed experts are stacked, `[E_local, ...]`. `rename` is a prefix to leave out: operators that serve several
    sites name their weights without the site.
    """
    named = [name for operand in operands for name in (operand, f"{operand}_scale") if name in WEIGHTS]
    specs = []
    for name in named:
        weight = WEIGHTS[name]
        stack: tuple[Dim, ...] = ("E_local",) if weight.per_expert else ()
        specs.append(TensorSpec(name.removeprefix(rename), (*stack, *weight.dims), weight.dtype))
    return tuple(specs)


def rope_rows(rows: Dim, prefix: str = "") -> tuple[TensorSpec, TensorSpec]:
    """Cosine and sine rows that `materialize_rope_rows` wrote."""
    return (
        reads(f"{prefix}rope_cos", "float32", rows, "HALF_ROPE"),
        reads(f"{prefix}rope_sin", "float32", rows, "HALF_ROPE"),
    )


_CACHES: dict[str, tuple[str, Dim, DataType, Dim, DataType]] = {
    "window_kv": ("WINDOW_BLOCKS", "HEAD_DIM", "float8_e4m3fn", "HEAD_DIM/MX", "float8_e8m0fnu"),
    "compressed_kv": ("COMPRESSED_BLOCKS", "HEAD_DIM/2", "uint8", "HEAD_DIM/FP4_GROUP", "float8_e4m3fn"),
    "index_key": ("COMPRESSED_BLOCKS", "INDEX_DIM/2", "uint8", "INDEX_DIM/MX", "float8_e8m0fnu"),
}
# The sizes are those of `cache_pools`; a test holds the two together.


def cache(name: str, direction: Direction) -> tuple[TensorSpec, TensorSpec]:
    """Payload and scales of a paged cache."""
    blocks, width, dtype, scale_width, scale_dtype = _CACHES[name]
    return (
        TensorSpec(name, (blocks, "BLOCK_ROWS", 1, width), dtype, direction),
        TensorSpec(f"{name}_scale", (blocks, "BLOCK_ROWS", 1, scale_width), scale_dtype, direction),
    )


def as_direction(tensors: tuple[TensorSpec, ...], direction: Direction) -> tuple[TensorSpec, ...]:
    """The same tensors, read, written or updated."""
    return tuple(dataclasses.replace(tensor, direction=direction) for tensor in tensors)
