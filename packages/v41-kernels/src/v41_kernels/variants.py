"""Operators in a form for the A5 alone, with its MX product: compiled, and not verified.

The interpreter ignores the product's scales without a word, so whatever values it gave would judge nothing. A variant
is therefore compiled and never run: what there is to know of it is a `CompiledVariant`, which has no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

NOT_VERIFIED = "compiled, not verified"
"""What is said of a variant wherever results are reported; it is neither accepted nor refused."""


@dataclass(frozen=True)
class Launch:
    """One kernel of a variant: its module, and constants for its `make_entry` beside the operator's sizes."""

    kernel: str
    constants: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Variant:
    """An operator as launches for the A5, with tensors in memory between them."""

    name: str
    operator: str
    launches: tuple[Launch, ...]
    device: str = "A5"


@dataclass(frozen=True)
class CompiledVariant:
    """A variant that compiled: for which architecture, in how many seconds, and the lowered graph's operations.

    `operations` counts them by pypto's names, over all launches.
    """

    variant: str
    operator: str
    architecture: str
    seconds: float
    operations: Mapping[str, int]
    status: str = field(default=NOT_VERIFIED, init=False)


def _linear(operator: str, exact_type: str) -> Variant:
    launches = (
        Launch("v41_kernels.kernels.quantized_activations"),
        Launch("v41_kernels.kernels.quantized_linear_a5", {"exact_type": exact_type}),
    )
    return Variant(f"{operator}_a5", operator, launches)


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        variant.name: variant
        for variant in (_linear("quantized_linear", "DT_BF16"), _linear("quantized_linear_fp32", "DT_FP32"))
    }
)
"""Every variant, by its name."""


def variants_of(operator: str) -> tuple[Variant, ...]:
    """The variants of an operator, mostly none."""
    return tuple(variant for variant in VARIANTS.values() if variant.operator == operator)
