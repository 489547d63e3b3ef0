"""Linears inside the stages, and the LM head's, in the terms of the ABI."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from v41_goldens import linear
from v41_goldens.quantized_weights import Fp4Weight, Fp8Weight
from v41_model.operator_call import Arguments, OperatorCalls, packed_weight

__all__ = ["LINEAR_CALLS"]


def _packed(x: Tensor, w: Fp8Weight | Fp4Weight) -> Arguments:
    return {"x": x, **packed_weight("w", w)}


def _plain(x: Tensor, w: Tensor) -> Arguments:
    return {"x": x, "w": w}


def _of_kind(kind: type[Fp8Weight] | type[Fp4Weight]) -> Callable[..., bool]:
    return lambda _, w: isinstance(w, kind)


LINEAR_CALLS: dict[str, OperatorCalls] = {
    calls.operator: calls
    for calls in (
        OperatorCalls("quantized_linear", linear.quantized_linear.__name__, _packed, _of_kind(Fp8Weight)),
        OperatorCalls("quantized_linear_fp4", linear.quantized_linear.__name__, _packed, _of_kind(Fp4Weight)),
        OperatorCalls("quantized_linear_fp32", linear.quantized_linear_fp32.__name__, _packed, _of_kind(Fp8Weight)),
        OperatorCalls("bf16_linear", linear.bf16_linear.__name__, _plain),
        OperatorCalls("fp32_linear", linear.fp32_linear.__name__, _plain),
    )
}
"""By the ABI's name; each stands behind the goldens' linear of its entry's name."""
