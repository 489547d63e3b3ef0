"""Bit-level number formats: E4M3, E8M0 and E2M1, encode and decode (model.md section 2).

Everything rounds to nearest, ties to the even code, and works on bit patterns instead of logarithms. Decoding is
exact. The table of E2M1 is built when first used, once per device; it tells what two bytes mean, because an indexed
read costs the same whatever its width.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from v41_goldens.errors import OperandError

E4M3_MAX = 448.0
"""Largest finite E4M3 value."""

E2M1_MAX = 6.0
"""Largest E2M1 value."""

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of E2M1 codes 0 to 7; bit 3 of a code is the sign."""

E8M0_NAN = 255
"""The E8M0 code that is not a number."""

_FP32_BIAS = 127

_E4M3_BITS_IN_FP16 = ~0x4000
"""Clears the copy of the sign that shifting a sign-extended byte leaves in the top exponent bit."""


def e4m3_decode(codes: Tensor) -> Tensor:
    """E4M3 codes to FP32, exactly (model.md section 2.1).

    Args:
        codes: float8_e4m3fn, or uint8 holding the same bytes; any shape. Bytes 0x7F and 0xFF are NaN.
    """
    codes = _as_dtype(codes.contiguous(), torch.float8_e4m3fn, "e4m3_decode codes")
    signed = codes.view(torch.int8)
    if codes.numel() and signed.bitwise_and(0x7F).max() == 0x7F:
        return codes.to(torch.float32)
    # Sign, exponent and mantissa placed at the same ends of an FP16 number mean 2^-8 times the value, subnormals too:
    # ten times as fast on a CPU as torch's cast. Only the NaN codes would come out wrong, as 480.
    fp16 = signed.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(_E4M3_BITS_IN_FP16)
    return fp16.view(torch.float16).to(torch.float32).mul_(256.0)


def e4m3_encode(x: Tensor) -> Tensor:
    """FP32 to float8_e4m3fn: clamped to +-448, then nearest even (model.md section 2.1).

    Infinities clamp like any large value; NaN stays NaN; zero keeps its sign.
    """
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def e8m0_decode(codes: Tensor) -> Tensor:
    """E8M0 codes to FP32, exactly: byte b means 2^(b - 127), byte 255 NaN (model.md section 2.2).

    Args:
        codes: float8_e8m0fnu, or uint8 holding the same bytes; any shape.
    """
    return _as_dtype(codes, torch.float8_e8m0fnu, "e8m0_decode codes").to(torch.float32)


def pow2_ceil_e8m0(x: Tensor) -> Tensor:
    """E8M0 codes of the smallest power of two at or above `x`, from the bit pattern (model.md section 2.2).

    The code is the exponent field, plus one if any mantissa bit is set. The sign bit is ignored. Subnormal values
    give code 1; finite values above 2^127 saturate at code 254; infinity and NaN give 255, which is NaN.

    Args:
        x: FP32, any shape.

    Returns:
        uint8 codes of the same shape.
    """
    bits = x.contiguous().view(torch.int32)
    exponent = (bits >> 23) & 0xFF
    code = (exponent + ((bits & 0x7FFFFF) != 0)).clamp_max_(E8M0_NAN - 1)
    return torch.where(exponent == 0xFF, E8M0_NAN, code).to(torch.uint8)


def e2m1_decode(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Packed E2M1 bytes to FP32 or BF16, exactly in both (model.md section 2.3).

    Args:
        packed: uint8 or int8 `[..., K/2]`; the even element stands in the low nibble.

    Returns:
        `[..., K]` of `dtype`; nibble 8 decodes to -0.
    """
    codes = _as_dtype(packed.contiguous(), torch.uint8, "e2m1_decode packed")
    return _look_up(codes, _e2m1_byte_pairs(packed.device)).to(dtype)


def e2m1_encode(x: Tensor) -> Tensor:
    """FP32 to packed E2M1 bytes: clamped to +-6, then nearest, ties to the even code (model.md section 2.3).

    Zero keeps its sign. E2M1 has no NaN: a NaN gives a zero, so whoever encodes one must mark it in the scale, as
    the quantisers do.

    Args:
        x: FP32 `[..., K]`, K even.

    Returns:
        uint8 `[..., K/2]`, the even element in the low nibble.
    """
    if x.shape[-1] % 2:
        raise OperandError("e2m1_encode x", tuple(x.shape), "an even last dimension")
    x = x.contiguous()
    magnitude = x.abs().clamp_max_(E2M1_MAX)
    # Values lie 1/2 apart below 2, 1 apart below 4, 2 apart above, and every step to a coarser grid skips two codes:
    # with e the exponent (at least 0) the code is round(magnitude / 2^(e-1)) + 2e, ties to even in both.
    exponent = (magnitude.view(torch.int32) >> 23).clamp_min_(_FP32_BIAS)
    inverse_step = ((2 * _FP32_BIAS + 1 - exponent) << 23).view(torch.float32)
    code = magnitude.mul_(inverse_step).round_().to(torch.int32).add_(exponent, alpha=2).sub_(2 * _FP32_BIAS)
    sign = (x.view(torch.int32) >> 28).bitwise_and_(8)
    nibbles = code.bitwise_or_(sign).to(torch.uint8)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def _as_dtype(codes: Tensor, dtype: torch.dtype, where: str) -> Tensor:
    """The same bytes as `dtype`: a view, never a numeric cast, which would destroy exponents."""
    if codes.dtype == dtype:
        return codes
    if codes.dtype not in (torch.uint8, torch.int8):
        raise OperandError(where, codes.dtype, f"{dtype}, or bytes")
    return codes.view(dtype)


def _look_up(codes: Tensor, byte_pairs: Tensor) -> Tensor:
    """BF16 values of bytes with two codes each, `[..., n]` to `[..., 2n]`: one look-up for two bytes.

    `gather` along the rows of an expanded table is the indexed read that torch runs on all threads.
    """
    count = codes.shape[-1]
    if count % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    if codes.storage_offset() % 2:
        codes = codes.clone()
    index = codes.view(torch.uint16).to(torch.int64)  # the low byte is the earlier one
    rows = index.unsqueeze(0).flatten(0, -2)
    values = byte_pairs.expand(len(rows), -1).gather(1, rows).view(torch.bfloat16)
    return values.view(*codes.shape[:-1], 2 * codes.shape[-1])[..., : 2 * count]


@functools.cache
def _e2m1_byte_pairs(device: torch.device) -> Tensor:
    """`[65536]`: the four BF16 values in each pair of bytes as one int64, 512 KB."""
    nibbles = torch.tensor([*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES)], dtype=torch.bfloat16)
    pair = torch.arange(1 << 16)
    values = torch.stack([nibbles[pair >> shift & 0xF] for shift in (0, 4, 8, 12)], dim=-1)
    return values.view(torch.int64).squeeze(-1).to(device)
