"""FP32 to the stored formats on bit patterns, in NumPy: BF16, FP8 in 32 x 32 tiles, FP4 in groups of 32.

Rules (model.md section 2): scales are the power of two at or above amax / largest value; codes round to nearest,
ties to even. NumPy rather than torch because the ufuncs run in cache-sized blocks on any number of threads without
touching a global thread setting, and because nothing else here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from v41_config.model_config import MX_GROUP

Float32s = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]

_TILE_COLUMNS = 1024
"""Columns of a 32-row band that are quantised at a time, so that the temporaries stay in the cache."""

_SMALLEST_AMAX = np.float32(1e-10)
_MANTISSA_BITS, _BIAS = 23, 127
_EXPONENT_MASK = np.int32(0x7F80_0000)
_MAGNITUDE_MASK = np.int32(0x7FFF_FFFF)


@dataclass(frozen=True)
class SmallFloat:
    """A float format of at most eight bits: sign, then exponent and mantissa with subnormals below `min_exponent`."""

    mantissa_bits: int
    min_exponent: int
    largest: float
    sign_bit: int


E4M3 = SmallFloat(mantissa_bits=3, min_exponent=-6, largest=448.0, sign_bit=7)
E2M1 = SmallFloat(mantissa_bits=1, min_exponent=0, largest=6.0, sign_bit=3)


def bf16_bits(values: Float32s) -> npt.NDArray[np.uint16]:
    """BF16 codes of finite FP32 values, rounded to nearest even."""
    bits = values.view(np.uint32)
    rounded: npt.NDArray[np.uint32] = (bits >> np.uint32(16)) & np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    return rounded.astype(np.uint16)


def pow2_ceil_exponent(x: Float32s) -> Int32s:
    """E8M0 codes of the smallest power of two >= x, for positive normal x."""
    bits = x.view(np.int32)
    codes: Int32s = (bits >> _MANTISSA_BITS) + ((bits & np.int32(0x7F_FFFF)) != 0)
    return codes


def small_float_codes(bits: Int32s, inverse_scale: Float32s, form: SmallFloat) -> Bytes:
    """Codes of `value * inverse_scale` in `form`, one per byte; values by their FP32 bits, at most `largest` scaled."""
    magnitude: Float32s = (bits & _MAGNITUDE_MASK).view(np.float32)
    magnitude *= inverse_scale
    # step = one unit in the last place of `form` at this magnitude; adding 2^23 steps makes the FPU round to a
    # multiple of it, and leaves that multiple in the low bits of the sum.
    smallest_binade = np.int32((_BIAS + form.min_exponent) << _MANTISSA_BITS)
    binade = magnitude.view(np.int32) & _EXPONENT_MASK
    np.maximum(binade, smallest_binade, out=binade)
    anchor = binade + np.int32((_MANTISSA_BITS - form.mantissa_bits) << _MANTISSA_BITS)
    magnitude += anchor.view(np.float32)
    codes = magnitude.view(np.int32)
    codes -= anchor
    binade -= smallest_binade
    binade >>= _MANTISSA_BITS - form.mantissa_bits
    codes += binade
    np.right_shift(bits, 31 - form.sign_bit, out=binade)
    binade &= np.int32(1 << form.sign_bit)
    codes |= binade
    return codes.astype(np.uint8)


def _scale(amax_bits: Int32s, form: SmallFloat) -> tuple[Bytes, Float32s]:
    """E8M0 codes of the scales for these maxima, and the scales' exact reciprocals."""
    amax = np.maximum(amax_bits.view(np.float32), _SMALLEST_AMAX)
    codes = pow2_ceil_exponent(amax / np.float32(form.largest))
    return codes.astype(np.uint8), ((2 * _BIAS - codes) << _MANTISSA_BITS).view(np.float32)


def fp8_tiles(values: Float32s) -> tuple[Bytes, Bytes]:
    """FP32 [32, K] to E4M3 codes [32, K] and E8M0 scales [K/32], one per 32 x 32 tile."""
    bits = values.view(np.int32)
    codes = np.empty(values.shape, np.uint8)
    scales = np.empty(values.shape[1] // MX_GROUP, np.uint8)
    for left in range(0, values.shape[1], _TILE_COLUMNS):
        block = bits[:, left : left + _TILE_COLUMNS]
        column_amax = np.max(block & _MAGNITUDE_MASK, axis=0)
        scale, inverse = _scale(np.max(column_amax.reshape(-1, MX_GROUP), axis=1), E4M3)
        scales[left // MX_GROUP : left // MX_GROUP + len(scale)] = scale
        # One reciprocal per column keeps the inner loops long.
        codes[:, left : left + _TILE_COLUMNS] = small_float_codes(block, np.repeat(inverse, MX_GROUP), E4M3)
    return codes, scales


def fp4_groups(values: Float32s) -> tuple[Bytes, Bytes]:
    """FP32 [N, K] to packed E2M1 [N, K/2], even element in the low nibble, and E8M0 scales [N, K/32]."""
    n, k = values.shape
    bits = values.view(np.int32)
    scale, inverse = _scale(np.max((bits & _MAGNITUDE_MASK).reshape(n, k // MX_GROUP, MX_GROUP), axis=2), E2M1)
    pairs = small_float_codes(bits, np.repeat(inverse, MX_GROUP, axis=1), E2M1).view(np.uint16)
    pairs |= pairs >> np.uint16(4)
    return pairs.astype(np.uint8), scale
