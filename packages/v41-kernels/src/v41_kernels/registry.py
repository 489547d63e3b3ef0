"""The operators that have a working kernel, by name. What is not listed here has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import v41_config
from v41_config import OperatorError, OperatorSpec
from v41_kernels.arguments import BoundArguments


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


def check_positions(bound: BoundArguments) -> None:
    """Active positions lie below the tables' capacity; negative ones are allowed. Errors: `OperatorError`."""
    active = bound.tensors["position_ids"][: bound.counts["num_tokens"]]
    capacity = bound.dims["CAPACITY"]
    if active.numel() and int(active.max()) >= capacity:
        token = int(active.argmax())
        where = f"{bound.spec.name}: position_ids[{token}]"
        raise OperatorError(where, int(active[token]), f"a position below the tables' capacity {capacity}")


def _with_kernel(
    name: str, check: Callable[[BoundArguments], None] | None = None, pass_tolerance: float = 0.0
) -> KernelOperator:
    return KernelOperator(v41_config.find_operator(name), f"v41_kernels.kernels.{name}", check, pass_tolerance)


OPERATORS: Mapping[str, KernelOperator] = MappingProxyType(
    {
        operator.spec.name: operator
        for operator in (
            _with_kernel("rms_norm", pass_tolerance=2**-7),  # a BF16 ulp: tiles of a row are summed one by one
            _with_kernel("materialize_rope_rows", check=check_positions),
            _with_kernel("mhc_post"),
        )
    }
)
"""Every operator whose kernel compiles, runs and equals its golden."""


def find_kernel(name: str, operators: Mapping[str, KernelOperator] = OPERATORS) -> KernelOperator:
    """The operator of that name, with its kernel. Errors: `OperatorError` with the names there are."""
    if name not in operators:
        raise OperatorError("operator", name, f"one that has a kernel: {', '.join(sorted(operators))}")
    return operators[name]
