"""Linear layers: quantised, BF16 and FP32 results (model.md sections 2.8 and 3).

Stages call these by name, so whoever exchanges one for another of its form does it here, for a while:
`exchanged_linears`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from v41_goldens import exact
from v41_goldens.operand_shapes import check_shapes
from v41_goldens.quantisers import dequantize_activation, quantize_activation
from v41_goldens.quantized_weights import Fp4Weight, Fp8Weight

Weight = TypeVar("Weight")
Linear = Callable[[Tensor, Any], Tensor]

_EXCHANGED: ContextVar[Mapping[str, Linear]] = ContextVar("exchanged linears", default=MappingProxyType({}))


@contextmanager
def exchanged_linears(linears: Mapping[str, Linear]) -> Iterator[None]:
    """Inside, other functions `(x, w)` take the place of the linears of these names; none keeps the goldens.

    Only what runs in the same context (see `contextvars`) sees it.
    """
    before = _EXCHANGED.set(linears)
    try:
        yield
    finally:
        _EXCHANGED.reset(before)


def _exchangeable(linear: Callable[[Tensor, Weight], Tensor]) -> Callable[[Tensor, Weight], Tensor]:
    @functools.wraps(linear)
    def call(x: Tensor, w: Weight) -> Tensor:
        return _EXCHANGED.get().get(linear.__name__, linear)(x, w)

    return call


@_exchangeable
def quantized_linear(x: Tensor, w: Fp8Weight | Fp4Weight) -> Tensor:
    """FP8 activations times FP8 or FP4 weights (model.md section 2.8).

    Args:
        x: BF16 `[..., K]`, quantised here in groups of 32.
        w: weights `[N, K]`.

    Returns:
        BF16 `[..., N]`: the dot products of the dequantised operands by E1, rounded to FP32, then to BF16.
    """
    return _quantized(x, w).to(torch.bfloat16)


@_exchangeable
def quantized_linear_fp32(x: Tensor, w: Fp8Weight | Fp4Weight) -> Tensor:
    """`quantized_linear` before its BF16 rounding: the FP32 partial `[..., N]` of a tensor-parallel output.

    Fast weights have rounded already.
    """
    return _quantized(x, w).to(torch.float32)


def _quantized(x: Tensor, w: Fp8Weight | Fp4Weight) -> Tensor:
    return w.dot(dequantize_activation(quantize_activation(x)))


def dequantized_linear(x: Tensor, w: Fp8Weight | Fp4Weight) -> Tensor:
    """BF16 dot products `[..., N]` of rows that are already quantised and dequantised, `[..., K]`, with `w`.

    What takes the place of `quantized_linear` takes this one's too; such rows are BF16 numbers that no quantisation
    changes any more.
    """
    exchanged = _EXCHANGED.get().get(quantized_linear.__name__)
    return w.dot(x).to(torch.bfloat16) if exchanged is None else exchanged(x.to(torch.bfloat16), w)


@_exchangeable
def bf16_linear(x: Tensor, w: Tensor) -> Tensor:
    """BF16 `[..., N]` of `x [..., K]` and `w [N, K]`: E1, then one more rounding to BF16."""
    check_shapes("bf16_linear", any_rows=True, x=x, w=w)
    return exact.dot(x, w).to(torch.bfloat16)


@_exchangeable
def fp32_linear(x: Tensor, w: Tensor) -> Tensor:
    """FP32 `[..., N]` of `x [..., K]` and `w [N, K]` by E1."""
    check_shapes("fp32_linear", any_rows=True, x=x, w=w)
    return exact.dot(x, w)
