"""Bit-level number formats: E4M3, E8M0 and E2M1, encode and decode (model.md section 2).

Everything rounds to nearest, ties to the even code, and works on bit patterns instead of logarithms. Decoding is
exact. The table of E2M1 is built when first used, once per device; it tells what two bytes mean, because an indexed
read costs the same whatever its width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from v41_goldens.errors import OperandError
from v41_goldens.scratch import MatrixMaker, new_matrix, scratch, scratch_matrix

E4M3_MAX = 448.0
"""Largest finite E4M3 value."""

E2M1_MAX = 6.0
"""Largest E2M1 value."""

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of E2M1 codes 0 to 7; bit 3 of a code is the sign."""

E8M0_NAN = 255
"""The E8M0 code that is not a number."""

_FP32_BIAS = 127
_FP32_INFINITY = 0x7F800000
_BF16_MANTISSA_BITS = 7

E4M3_UNIT_IN_FP16 = 256.0
"""What the numbers of `e4m3_in_fp16` have to be multiplied by."""

_E4M3_BITS_IN_FP16 = ~0x4000
"""Clears the copy of the sign that shifting a sign-extended byte leaves in the top exponent bit."""

_CHUNK_ELEMENTS = 1 << 20
"""Elements of `e2m1_times_e8m0` made at a time: what is needed on the way (4 MB) stays in cache and is used again."""

_NON_ZERO = 1
"""Lowest bit of a BF16 number, which no E2M1 value needs: set in the table of `e2m1_times_e8m0` unless it is a zero."""

_ADDABLE_SCALES = (2, 252)
"""E8M0 codes whose products with all of E2M1's magnitudes, 2^-1 to 2^2 and their halves, are normal BF16 numbers."""


def e4m3_decode(codes: Tensor) -> Tensor:
    """E4M3 codes to FP32, exactly (model.md section 2.1).

    Args:
        codes: float8_e4m3fn, or uint8 holding the same bytes; any shape. Bytes 0x7F and 0xFF are NaN.
    """
    codes = _as_dtype(codes.contiguous(), torch.float8_e4m3fn, "e4m3_decode codes")
    fp16 = e4m3_in_fp16(codes)
    return codes.to(torch.float32) if fp16 is None else fp16.to(torch.float32).mul_(E4M3_UNIT_IN_FP16)


def e4m3_in_fp16(codes: Tensor) -> Tensor | None:
    """FP16 numbers that are E4M3 codes divided by `E4M3_UNIT_IN_FP16`, or None where a code is NaN.

    They are the thread's scratch of INT16, to be copied at once.

    Sign, exponent and mantissa placed at the same ends of an FP16 number mean 2^-8 times the value, subnormals too:
    ten times as fast on a CPU as torch's cast. Only the NaN codes would come out wrong, as 480.

    Args:
        codes: float8_e4m3fn, contiguous, any shape.
    """
    signed = codes.view(torch.int8)
    if codes.numel() and (signed.max() == 0x7F or codes.view(torch.uint8).max() == 0xFF):
        return None
    wide = scratch(codes.numel(), torch.int16, codes.device).view(codes.shape).copy_(signed)
    # A product by 2^7: the same bits as a shift by 7, which takes torch half as long again.
    return wide.mul_(1 << 7).bitwise_and_(_E4M3_BITS_IN_FP16).view(torch.float16)


def e4m3_encode(x: Tensor) -> Tensor:
    """FP32 to float8_e4m3fn: clamped to +-448, then nearest even (model.md section 2.1).

    Infinities clamp like any large value; NaN stays NaN; zero keeps its sign.
    """
    _check_fp32(x, "e4m3_encode x")
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def e8m0_decode(codes: Tensor) -> Tensor:
    """E8M0 codes to FP32, exactly: byte b means 2^(b - 127), byte 255 NaN (model.md section 2.2).

    Args:
        codes: float8_e8m0fnu, or uint8 holding the same bytes; any shape.
    """
    return _as_dtype(codes, torch.float8_e8m0fnu, "e8m0_decode codes").to(torch.float32)


def pow2_ceil_e8m0(x: Tensor) -> Tensor:
    """E8M0 codes of the smallest power of two at or above `x`, from the bit pattern (model.md section 2.2).

    The code is the exponent field, plus one if any mantissa bit is set: a carry out of the mantissa. The sign bit is
    ignored. Subnormal values give code 1; finite values above 2^127 saturate at code 254; infinity and NaN give 255,
    which is NaN.

    Args:
        x: FP32, any shape.

    Returns:
        uint8 codes of the same shape.
    """
    _check_fp32(x, "pow2_ceil_e8m0 x")
    magnitude = x.contiguous().view(torch.int32) & 0x7FFFFFFF
    code = (magnitude + 0x7FFFFF).bitwise_right_shift_(23).clamp_max_(E8M0_NAN - 1)
    return torch.where(magnitude >= _FP32_INFINITY, E8M0_NAN, code).to(torch.uint8)


def e2m1_decode(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Packed E2M1 bytes to FP32 or BF16, exactly in both (model.md section 2.3).

    Args:
        packed: uint8 or int8 `[..., K/2]`; the even element stands in the low nibble.

    Returns:
        `[..., K]` of `dtype`; nibble 8 decodes to -0.
    """
    codes = _as_dtype(packed.contiguous(), torch.uint8, "e2m1_decode packed")
    return _look_up(codes, _e2m1_byte_pairs(packed.device)).to(dtype)


def e2m1_times_e8m0(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Packed E2M1 bytes times their E8M0 scales (model.md sections 2.2 and 2.3).

    Exact as far as the range of `dtype` goes: a product beyond it becomes infinite, BF16 loses bits below 2^-126.

    Args:
        packed: uint8 or int8 `[..., K/2]`; the even element stands in the low nibble.
        scale: float8_e8m0fnu `[..., G]`, each for K/G neighbours, an even number of bytes.
        dtype: FP32 or BF16.

    Returns:
        `[..., K]` of `dtype`.

    Raises:
        OperandError: shapes that do not belong to each other, or another dtype.
    """
    return e2m1_rows(packed, scale, dtype, new_matrix)(slice(None)).view(*packed.shape[:-1], 2 * packed.shape[-1])


def e2m1_rows(
    packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32, matrix: MatrixMaker = scratch_matrix
) -> Callable[[slice], Tensor]:
    """`e2m1_times_e8m0` of a slice of rows, for callers that take one after the other: scales are looked at once.

    Operands and errors are those of `e2m1_times_e8m0`; rows are counted as if there were two dimensions, and come so.
    They may lie in memory from `matrix`, by default scratch.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise OperandError("e2m1_times_e8m0 dtype", dtype, "torch.float32 or torch.bfloat16")
    *rows, count = scale.shape or (0,)
    group = 2 * (packed.shape[-1] // max(1, count)) if packed.dim() else 0
    if not scale.dim() or packed.shape != (*rows, group // 2 * count):
        found = (tuple(packed.shape), tuple(scale.shape))
        raise OperandError("e2m1_times_e8m0 packed, scale", found, "[..., K/2] and [..., G], K/2 a multiple of G")
    codes = _as_dtype(packed.contiguous(), torch.uint8, "e2m1_times_e8m0 packed").view(prod(rows), packed.shape[-1])
    scale = scale.contiguous().view(prod(rows), count)
    if codes.numel() and group % 4 == 0 and _are_addable(scale):
        pairs, steps = _byte_pairs_of(codes), _exponent_steps(scale).unsqueeze(-1)
        return lambda own: _with_exponents_added(pairs[own], steps[own], matrix).to(dtype)

    def multiplied(own: slice) -> Tensor:
        factors = e8m0_decode(scale[own]).to(dtype)
        return e2m1_decode(codes[own], dtype).view(*factors.shape, group).mul_(factors.unsqueeze(-1)).flatten(-2)

    return multiplied


def e2m1_encode(x: Tensor) -> Tensor:
    """FP32 to packed E2M1 bytes: clamped to +-6, then nearest, ties to the even code (model.md section 2.3).

    Zero keeps its sign. E2M1 has no NaN: a NaN gives a zero, so whoever encodes one must mark it in the scale, as
    the quantisers do.

    Args:
        x: FP32 `[..., K]`, K even.

    Returns:
        uint8 `[..., K/2]`, the even element in the low nibble.
    """
    _check_fp32(x, "e2m1_encode x")
    if not x.dim() or x.shape[-1] % 2:
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


def _check_fp32(x: Tensor, where: str) -> None:
    """The bits of another type would be taken for those of an FP32 number, or be rounded twice."""
    if x.dtype != torch.float32:
        raise OperandError(where, x.dtype, "torch.float32")


def _as_dtype(codes: Tensor, dtype: torch.dtype, where: str) -> Tensor:
    """The same bytes as `dtype`: a view, never a numeric cast, which would destroy exponents."""
    if codes.dtype == dtype:
        return codes
    if codes.dtype not in (torch.uint8, torch.int8):
        raise OperandError(where, codes.dtype, f"{dtype}, or bytes")
    return codes.view(dtype)


def _are_addable(scale: Tensor) -> bool:
    smallest, largest = torch.aminmax(scale.view(torch.uint8))
    return bool(smallest >= _ADDABLE_SCALES[0] and largest <= _ADDABLE_SCALES[1])


def _exponent_steps(scale: Tensor) -> Tensor:
    """INT16: what E8M0 codes within `_ADDABLE_SCALES` add to the bits of a marked BF16 number."""
    exponents = scale.view(torch.uint8).to(torch.int16).sub_(_FP32_BIAS)
    return exponents.bitwise_left_shift_(_BF16_MANTISSA_BITS).sub_(_NON_ZERO)


def _with_exponents_added(pairs: Tensor, steps: Tensor, matrix: MatrixMaker) -> Tensor:
    """BF16 `[R, 4n]` of `_byte_pairs_of` codes `[R, n]` and `_exponent_steps` `[R, G, 1]`.

    In range, a product is a sum of exponents: an integer addition, three times as fast as BF16's multiplication. Zeros
    must stay zero, so all other values are marked in the table; the same addition takes the mark away.
    """
    count, n = pairs.shape
    result = matrix(count, 4 * n, torch.bfloat16, pairs.device)
    values, fours = result.view(torch.int16), result.view(torch.int64)
    rows = max(1, min(count, _CHUNK_ELEMENTS // (4 * n)))
    table = _e2m1_byte_pairs(pairs.device, _NON_ZERO).expand(rows, -1)
    index = scratch(rows * n, torch.int64, pairs.device).view(rows, n)
    marked = index.view(torch.int16)  # the index is of no use any more by then
    groups = (steps.shape[1], -1)
    for start in range(0, count, rows):
        own, size = slice(start, start + rows), min(rows, count - start)
        torch.gather(table[:size], 1, index[:size].copy_(pairs[own]), out=fours[own])
        torch.bitwise_and(values[own], _NON_ZERO, out=marked[:size])
        values[own].unflatten(1, groups).addcmul_(marked[:size].unflatten(1, groups), steps[own])
    return result


def _look_up(codes: Tensor, byte_pairs: Tensor) -> Tensor:
    """BF16 values of bytes with two codes each, `[..., n]` to `[..., 2n]`: one look-up for two bytes.

    `gather` along the rows of an expanded table is the indexed read that torch runs on all threads.
    """
    count = codes.shape[-1]
    if count % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    rows = _byte_pairs_of(codes).to(torch.int64).unsqueeze(0).flatten(0, -2)
    values = byte_pairs.expand(len(rows), -1).gather(1, rows).view(torch.bfloat16)
    return values.view(*codes.shape[:-1], 2 * codes.shape[-1])[..., : 2 * count]


def _byte_pairs_of(codes: Tensor) -> Tensor:
    """Contiguous bytes `[..., 2n]` as uint16 `[..., n]`, the earlier byte the low one."""
    flat = codes.flatten()  # of one row, or of none, the stride may be odd
    pairs = (flat.clone() if flat.storage_offset() % 2 else flat).view(torch.uint16)
    return pairs.view(*codes.shape[:-1], codes.shape[-1] // 2)


@functools.cache
def _e2m1_byte_pairs(device: torch.device, mark: int = 0) -> Tensor:
    """`[65536]`: the four BF16 values in each pair of bytes as one int64, 512 KB; `mark` is in all but the zeros."""
    magnitudes = torch.tensor(E2M1_MAGNITUDES, dtype=torch.bfloat16, device="cpu")
    nibbles = torch.cat([magnitudes, -magnitudes])
    nibbles.view(torch.int16).add_((nibbles != 0).to(torch.int16), alpha=mark)
    pair = torch.arange(1 << 16, device="cpu")
    values = torch.stack([nibbles[pair >> shift & 0xF] for shift in (0, 4, 8, 12)], dim=-1)
    return values.view(torch.int64).squeeze(-1).to(device)
