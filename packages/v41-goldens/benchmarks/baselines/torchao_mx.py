"""MX formats of torchao, where it is installed; otherwise the same steps written down from its version 0.18.

The transcription leaves out checks and branches for other formats, which cost nothing beside the tensors.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

Dequantize = Callable[[Tensor, Tensor, torch.dtype], Tensor]
Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]


def torchao_mx() -> tuple[str, Dequantize, Quantize]:
    """What is measured, MXFP4 dequantisation, and MXFP8 quantisation (E4M3, blocks of 32, scales rounded up)."""
    if importlib.util.find_spec("torchao") is None:
        return "torchao 0.18 (a transcription: it is not installed)", _dequantize_fp4, _quantize_fp8
    mx = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
    version = importlib.import_module("torchao").__version__

    def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        found: Tensor = mx.to_dtype(packed.view(torch.uint8), scale, torch.float4_e2m1fn_x2, 32, dtype)
        return found

    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        scale, codes = mx.to_mx(x, torch.float8_e4m3fn, 32, mx.ScaleCalculationMode.RCEIL)
        return codes, scale

    return f"torchao {version}", dequantize, quantize


def _dequantize_fp4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    codes = packed.view(torch.uint8)
    nibbles = torch.stack([codes & 0xF, codes >> 4], dim=-1).view(*codes.shape[:-1], -1)
    sign = nibbles & 0x8
    nibbles = nibbles ^ sign
    zero, denormal = nibbles == 0, nibbles == 1
    exponent = (nibbles >> 1).to(torch.int32) - 1 + 127
    mantissa = (nibbles & 1).to(torch.int32) << 22
    bits = (exponent << 23) | mantissa
    bits[zero] = 0
    bits[denormal] = 126 << 23
    values = (bits | sign.to(torch.int32) << 28).view(torch.float32).to(dtype)
    factor = torch.pow(2.0, scale.view(torch.uint8).to(torch.int16).to(torch.float32) - 127).reshape(-1, 1).to(dtype)
    return (values.reshape(-1, 32) * factor).reshape(nibbles.shape)


def _quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    groups = x.reshape(*x.shape[:-1], -1, 32)
    amax = groups.abs().amax(-1).unsqueeze(-1).to(torch.float32)
    values = groups.to(torch.float32)
    bits = (amax / 448.0).view(torch.int32)
    exponent = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0)
    scale = torch.where(torch.isnan(amax), 255, exponent.clamp(0, 254)).to(torch.uint8)
    factor = (scale.to(torch.int32) << 23).view(torch.float32)
    codes = (values / factor.clamp_min(2.0**-126)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.reshape(x.shape), scale.view(torch.float8_e8m0fnu).squeeze(-1)
