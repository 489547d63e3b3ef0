"""The four quantisers of activations and caches (model.md sections 2.4 to 2.7).

Each takes BF16 rows, cuts them into groups along the last dimension and gives the packed payload with its scales;
each has its own `dequantize_*`. A group that holds an infinity or a NaN gets a NaN scale, so that all of it
dequantises to NaN: nothing that is not finite becomes a finite number.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from v41_config.model_config import FP4_CACHE_GROUP, MX_GROUP
from v41_goldens.errors import OperandError
from v41_goldens.number_formats import (
    E2M1_MAX,
    E4M3_MAX,
    e2m1_decode,
    e2m1_encode,
    e2m1_times_e8m0,
    e4m3_decode,
    e4m3_encode,
    e8m0_decode,
    pow2_ceil_e8m0,
)
from v41_goldens.scratch import scratch

FP8_AMAX_FLOOR = 1e-4
"""Smallest amax of an FP8 group, so that a zero row has a scale."""

INDEX_AMAX_FLOOR = 6.0 * 2.0**-126
"""Smallest amax of an index group: its scale is the smallest normal power of two."""

COMPRESSED_KV_AMAX_FLOOR = 6.0 * 2.0**-9
"""Smallest amax of a compressed KV group: its scale is the smallest E4M3 number."""

_RECIPROCAL_E4M3_MAX = float(np.float32(1.0 / E4M3_MAX))
_RECIPROCAL_E2M1_MAX = float(np.float32(1.0 / E2M1_MAX))


_CHUNK_ELEMENTS = 1 << 20
"""Elements quantised at a time: their two FP32 copies (4 MB each) stay in cache and are used again."""


class Quantized(NamedTuple):
    """Packed rows: `payload` holds codes, `scale` one number per group of the last dimension."""

    payload: Tensor
    scale: Tensor


def quantize_activation(x: Tensor) -> Quantized:
    """Input of a quantised linear: FP8 in groups of 32 (model.md section 2.4).

    Args:
        x: BF16 `[..., K]`, K a multiple of 32.

    Returns:
        payload float8_e4m3fn `[..., K]`, scale float8_e8m0fnu `[..., K/32]`: the smallest power of two at or above
        `max(amax, 1e-4) * FP32(1/448)`.
    """
    _check_groups(x, MX_GROUP, "quantize_activation x")
    payload = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(*x.shape[:-1], x.shape[-1] // MX_GROUP, dtype=torch.uint8, device=x.device)
    groups, codes, scales = x.detach().reshape(-1, MX_GROUP), payload.view(-1, MX_GROUP), scale.view(-1)
    step = max(1, _CHUNK_ELEMENTS // MX_GROUP)
    buffers = scratch(2 * min(step, len(groups)) * MX_GROUP, torch.float32, x.device).view(2, -1, MX_GROUP)
    scale_of_amax, inverse_of_amax = _activation_scales(x.device)
    for start in range(0, len(groups), step):
        chunk = slice(start, start + step)
        values, magnitudes = buffers[:, : len(groups[chunk])]
        amax = torch.abs(values.copy_(groups[chunk]), out=magnitudes).amax(-1)
        bits = amax.view(torch.int32).bitwise_right_shift_(16).bitwise_and_(0x7FFF)
        torch.index_select(scale_of_amax, 0, bits, out=scales[chunk])
        # No clamp: BF16 has no amax so little above 448 times a power of two that the product rounds down to it.
        codes[chunk] = values.mul_(inverse_of_amax.index_select(0, bits).unsqueeze(-1))
    return Quantized(payload, scale.view(torch.float8_e8m0fnu))


@functools.cache
def _activation_scales(device: torch.device) -> tuple[Tensor, Tensor]:
    """E8M0 codes and, FP32, one divided by what they mean, of all `[32768]` magnitudes that BF16 has, by their bits."""
    with torch.inference_mode(False):  # tables of this mode could not be used outside of it
        bits = torch.arange(1 << 15, dtype=torch.int32, device="cpu").to(torch.int16)
        amax = bits.view(torch.bfloat16).to(torch.float32)
        codes = pow2_ceil_e8m0(amax.clamp_min_(FP8_AMAX_FLOOR).mul_(_RECIPROCAL_E4M3_MAX))
        return codes.to(device), e8m0_decode(codes).reciprocal_().to(device)


def dequantize_activation(q: Quantized) -> Tensor:
    """FP32 `[..., K]` of `quantize_activation`'s result, exactly."""
    return _scaled(e4m3_decode(q.payload), e8m0_decode(q.scale))


def quantize_window_kv(kv: Tensor) -> Quantized:
    """Rotated window KV `[..., K]` BF16: the activation's rule (model.md section 2.5)."""
    return quantize_activation(kv)


def dequantize_window_kv(q: Quantized) -> Tensor:
    """BF16 `[..., K]` of `quantize_window_kv`'s result; exact, since code times power of two fits BF16."""
    return dequantize_activation(q).to(torch.bfloat16)


def quantize_compressed_kv(kv: Tensor) -> Quantized:
    """Rotated compressed KV: FP4 in groups of 16 with an E4M3 scale that is no power of two (model.md section 2.6).

    Args:
        kv: BF16 `[..., K]`, K a multiple of 16.

    Returns:
        payload uint8 `[..., K/2]` packed E2M1, scale float8_e4m3fn `[..., K/16]`: `max(amax, 6 * 2^-9) / 6`, divided
        in FP32 and rounded to E4M3.
    """
    groups, amax = _groups(kv, FP4_CACHE_GROUP, "quantize_compressed_kv kv")
    quotient = amax.clamp_min(COMPRESSED_KV_AMAX_FLOOR) / amax.new_tensor(E2M1_MAX)
    # E4M3 saturates an infinity, which would make the group finite.
    scale = e4m3_encode(torch.where(quotient.isinf(), math.nan, quotient))
    return Quantized(_e2m1_groups(groups, e4m3_decode(scale)), scale)


def dequantize_compressed_kv(q: Quantized) -> Tensor:
    """BF16 `[..., K]` of `quantize_compressed_kv`'s result; exact, since code times scale has at most 6 bits."""
    return _scaled(e2m1_decode(q.payload), e4m3_decode(q.scale)).to(torch.bfloat16)


def quantize_index(x: Tensor) -> Quantized:
    """Rotated index queries and keys: FP4 in groups of 32 with an E8M0 scale (model.md section 2.7).

    Args:
        x: BF16 `[..., K]`, K a multiple of 32.

    Returns:
        payload uint8 `[..., K/2]` packed E2M1, scale float8_e8m0fnu `[..., K/32]`: the smallest power of two at or
        above `max(amax, 6 * 2^-126) * FP32(1/6)`.
    """
    groups, amax = _groups(x, MX_GROUP, "quantize_index x")
    scale = pow2_ceil_e8m0(amax.clamp_min_(INDEX_AMAX_FLOOR).mul_(_RECIPROCAL_E2M1_MAX))
    return Quantized(_e2m1_groups(groups, e8m0_decode(scale)), scale.view(torch.float8_e8m0fnu))


def dequantize_index(q: Quantized) -> Tensor:
    """BF16 `[..., K]` of `quantize_index`'s result; exact, since code times power of two fits BF16."""
    return e2m1_times_e8m0(q.payload, q.scale, torch.bfloat16)


def _groups(x: Tensor, size: int, where: str) -> tuple[Tensor, Tensor]:
    """FP32 `[..., K/size, size]` and the largest magnitude of each group `[..., K/size]`; NaN wins over any number."""
    _check_groups(x, size, where)
    groups = x.to(torch.float32).reshape(*x.shape[:-1], x.shape[-1] // size, size)
    return groups, groups.abs().amax(-1)


def _check_groups(x: Tensor, size: int, where: str) -> None:
    if x.dtype != torch.bfloat16:
        raise OperandError(where, x.dtype, "torch.bfloat16")
    if not x.dim() or x.shape[-1] % size:
        raise OperandError(where, tuple(x.shape), f"a last dimension that is a multiple of {size}")


def _e2m1_groups(groups: Tensor, scale: Tensor) -> Tensor:
    return e2m1_encode((groups / scale.unsqueeze(-1)).flatten(-2))


def _scaled(values: Tensor, scale: Tensor) -> Tensor:
    """`values [..., K]` times `scale [..., G]`, each scale for K/G neighbours; overwrites `values`."""
    groups = values.view(*scale.shape, values.shape[-1] // max(1, scale.shape[-1]))
    return groups.mul_(scale.unsqueeze(-1)).view(values.shape)
