"""The operators that have a working kernel, by name. What is not listed here does not exist."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from v41_kernels.arguments import BoundArguments
from v41_kernels.errors import OperatorArgumentError
from v41_kernels.operator_spec import ConstantSpec, CountSpec, OperatorSpec, TensorSpec


@dataclass(frozen=True)
class KernelOperator:
    """An operator's contract, and the module whose `make_entry(**static_dims, **constants)` gives its jit entry.

    `check` looks at values that the contract limits. `pass_tolerance` is how far, relatively, a destination may move
    when a compiler pass cuts the kernel into tiles: 0 unless a reduction is summed in another order then.
    """

    spec: OperatorSpec
    kernel: str
    check: Callable[[BoundArguments], None] | None = None
    pass_tolerance: float = 0.0


def _check_positions(bound: BoundArguments) -> None:
    """Active positions lie below the tables' capacity; negative ones are allowed."""
    active = bound.tensors["position_ids"][: bound.counts["num_tokens"]]
    capacity = bound.dims["CAPACITY"]
    if active.numel() and int(active.max()) >= capacity:
        token = int(active.argmax())
        where = f"materialize_rope_rows: position_ids[{token}]"
        raise OperatorArgumentError(where, int(active[token]), f"a position below the tables' capacity {capacity}")


_NUM_TOKENS = CountSpec("num_tokens", limit="T")

_RMS_NORM = KernelOperator(
    OperatorSpec(
        "rms_norm",
        (
            TensorSpec("x", ("T", "D"), "BF16"),
            TensorSpec("weight", ("D",), "BF16"),
            TensorSpec("out", ("T", "D"), "BF16", "out"),
        ),
        (_NUM_TOKENS, ConstantSpec("eps", 1e-20)),
        "out = x * rsqrt(mean(x^2) + eps) * weight in FP32, one rounding to BF16 (model.md section 6)",
    ),
    "v41_kernels.kernels.rms_norm",
    pass_tolerance=2**-7,  # one BF16 ulp: the tiles of a row are summed one by one
)

_MATERIALIZE_ROPE_ROWS = KernelOperator(
    OperatorSpec(
        "materialize_rope_rows",
        (
            TensorSpec("freqs_cos", ("CAPACITY", "HALF_ROPE"), "FP32"),
            TensorSpec("freqs_sin", ("CAPACITY", "HALF_ROPE"), "FP32"),
            TensorSpec("position_ids", ("T",), "INT32"),
            TensorSpec("rope_cos", ("T", "HALF_ROPE"), "FP32", "out"),
            TensorSpec("rope_sin", ("T", "HALF_ROPE"), "FP32", "out"),
        ),
        (_NUM_TOKENS,),
        "row t = the tables' row at position_ids[t]; a negative position gives cos 1, sin 0 (model.md section 7)",
    ),
    "v41_kernels.kernels.materialize_rope_rows",
    check=_check_positions,
)

_MHC_POST = KernelOperator(
    OperatorSpec(
        "mhc_post",
        (
            TensorSpec("y", ("T", "D"), "BF16"),
            TensorSpec("x_hc", ("T", "HC", "D"), "BF16"),
            TensorSpec("post", ("T", "HC"), "FP32"),
            TensorSpec("comb", ("T", "HC", "HC"), "FP32"),
            TensorSpec("out", ("T", "HC", "D"), "BF16", "out"),
        ),
        (_NUM_TOKENS,),
        "out_k = post_k * y + sum_j comb[j, k] * x_hc_j in FP32, one rounding to BF16 (model.md section 5)",
    ),
    "v41_kernels.kernels.mhc_post",
)

OPERATORS: Mapping[str, KernelOperator] = MappingProxyType(
    {operator.spec.name: operator for operator in (_RMS_NORM, _MATERIALIZE_ROPE_ROWS, _MHC_POST)}
)
"""Every operator whose kernel compiles, runs and equals its golden."""


def find_operator(name: str, operators: Mapping[str, KernelOperator] = OPERATORS) -> KernelOperator:
    """The operator of that name. Errors: `OperatorArgumentError` with the names there are."""
    if name not in operators:
        raise OperatorArgumentError("operator", name, f"one of {', '.join(sorted(operators))}")
    return operators[name]
