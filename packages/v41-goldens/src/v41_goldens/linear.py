"""Linear layers: quantised, BF16 and FP32 results (model.md sections 2.8 and 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from v41_goldens import exact
from v41_goldens.operand_shapes import check_shapes
from v41_goldens.quantisers import dequantize_activation, quantize_activation
from v41_goldens.weights import Fp4Weight, Fp8Weight


def quantized_linear(x: Tensor, w: Fp8Weight | Fp4Weight) -> Tensor:
    """FP8 activations times FP8 or FP4 weights (model.md section 2.8).

    Args:
        x: BF16 `[..., K]`, quantised here in groups of 32.
        w: weights `[N, K]`.

    Returns:
        BF16 `[..., N]`: the dot products of the dequantised operands by E1, rounded to FP32, then to BF16.
    """
    return quantized_linear_fp32(x, w).to(torch.bfloat16)


def quantized_linear_fp32(x: Tensor, w: Fp8Weight | Fp4Weight) -> Tensor:
    """`quantized_linear` before its BF16 rounding: the FP32 partial `[..., N]` of a tensor-parallel output."""
    return dequantized_linear(dequantize_activation(quantize_activation(x)), w)


def dequantized_linear(x: Tensor, w: Fp8Weight | Fp4Weight) -> Tensor:
    """FP32 dot products `[..., N]` of rows that are already quantised and dequantised, `[..., K]`, with `w`."""
    return w.dot(x)


def bf16_linear(x: Tensor, w: Tensor) -> Tensor:
    """BF16 `[..., N]` of `x [..., K]` and `w [N, K]`: E1, then one more rounding to BF16."""
    check_shapes("bf16_linear", x=x, w=w)
    return exact.dot(x, w).to(torch.bfloat16)


def fp32_linear(x: Tensor, w: Tensor) -> Tensor:
    """FP32 `[..., N]` of `x [..., K]` and `w [N, K]` by E1."""
    check_shapes("fp32_linear", x=x, w=w)
    return exact.dot(x, w)
