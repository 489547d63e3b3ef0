"""E4M3, E8M0 and E2M1 as bytes, decoded and encoded by arithmetic (model.md section 2).

The compiler's own FP8 and FP4 casts give wrong values, so codes travel as INT8 tiles and are never cast to a number
format. Rounding is to nearest, ties to even, as `round` does on a grid of one exponent.
"""

from typing import Any

import pypto

from v41_kernels.kernels.stages.powers_of_two import floor_log2, half_power_of_two, power_of_two, wide_power_of_two

_SMALLEST = 2.0**-20  # below every grid in use; keeps zero away from the logarithm


def signed_byte(codes: Any) -> Any:
    """FP32 -128 to 127 of an INT8 tile."""
    return pypto.cast(pypto.cast(codes, pypto.DT_FP16), pypto.DT_FP32)


def unsigned_byte(codes: Any) -> Any:
    """FP32 0 to 255 of an INT8 tile."""
    value = signed_byte(codes)
    return pypto.where(pypto.lt(value, 0.0), value + 256.0, value)


def as_byte(code: Any) -> Any:
    """INT8 tile of FP32 codes 0 to 255."""
    value = pypto.where(pypto.ge(code, 128.0), code - 256.0, code)
    return pypto.cast(pypto.cast(value, pypto.DT_FP16), pypto.DT_INT8)


def sign_bit(value: Any) -> Any:
    """FP32 1 where `value` is negative, -0 included, else 0."""
    return pypto.where(pypto.lt(pypto.minimum(value, pypto.reciprocal(value)), 0.0), 1.0, 0.0)


def decode_e8m0(codes: Any) -> Any:
    """FP32 power of two of E8M0 bytes; 255 gives NaN."""
    code = unsigned_byte(codes)
    scale = wide_power_of_two(pypto.minimum(code, 254.0) - 127.0)
    return pypto.where(pypto.gt(code, 254.5), float("nan"), scale)


def decode_e4m3_code(code: Any) -> Any:
    """FP32 magnitude of FP32 codes 0 to 127 (127, a NaN, gives 480)."""
    exponent = pypto.floor(code * 0.125)
    mantissa = code - exponent * 8.0
    normal = (mantissa + 8.0) * power_of_two(exponent - 10.0)
    return pypto.where(pypto.lt(code, 8.0), code * 2.0**-9, normal)


def decode_e4m3(codes: Any) -> Any:
    """FP32 values of E4M3 bytes (127, a NaN, gives 480), by way of FP16, in which they and all steps are exact."""
    byte = pypto.cast(pypto.cast(codes, pypto.DT_FP16), pypto.DT_INT16)
    mantissa = pypto.cast(pypto.bitwise_and(byte, 7), pypto.DT_FP16)
    exponent = pypto.cast(pypto.bitwise_and(pypto.bitwise_right_shift(byte, 3), 15), pypto.DT_FP16)
    sign = pypto.cast(pypto.bitwise_and(byte, 128), pypto.DT_FP16) * (-0.015625) + 1.0
    steps = pypto.minimum(exponent, 1.0) * 8.0 + mantissa  # a subnormal has the grid of the smallest exponent
    power = half_power_of_two(pypto.maximum(exponent, 1.0) - 10.0)
    return pypto.cast(steps * power * sign, pypto.DT_FP32)


def encode_e4m3(magnitude: Any) -> Any:
    """FP32 codes 0 to 126 of magnitudes up to 448."""
    exponent = pypto.maximum(floor_log2(pypto.maximum(magnitude, _SMALLEST)), -6.0)
    steps = pypto.round(magnitude * power_of_two(exponent * (-1.0) + 3.0))
    return (exponent + 6.0) * 8.0 + steps  # steps of a subnormal are its code, and a carry moves on by itself


def round_to_e4m3(value: Any) -> Any:
    """The E4M3 number nearest to FP32 values within -448 to 448, in FP32."""
    exponent = pypto.maximum(floor_log2(pypto.maximum(pypto.abs(value), _SMALLEST)), -6.0)
    return pypto.round(value * power_of_two(exponent * (-1.0) + 3.0)) * power_of_two(exponent - 3.0)


def encode_e2m1(magnitude: Any) -> Any:
    """FP32 codes 0 to 7 of magnitudes up to 6."""
    exponent = pypto.maximum(floor_log2(pypto.maximum(magnitude, _SMALLEST)), 0.0)
    return exponent * 2.0 + pypto.round(magnitude * power_of_two(exponent * (-1.0) + 1.0))


def _e2m1_value(nibble: Any) -> Any:
    """FP32 values of INT16 tiles whose low four bits are E2M1 codes."""
    index = pypto.cast(pypto.bitwise_and(nibble, 7), pypto.DT_FP16)
    sign = pypto.cast(pypto.bitwise_and(nibble, 8), pypto.DT_FP16) * (-0.25) + 1.0
    magnitude = pypto.maximum(pypto.maximum(index * 0.5, index - 2.0), index * 2.0 - 8.0)
    return pypto.cast(magnitude * sign, pypto.DT_FP32)


def decode_e2m1(packed: Any) -> tuple[Any, Any]:
    """FP32 values of the even and of the odd elements of packed bytes."""
    byte = pypto.cast(pypto.cast(packed, pypto.DT_FP16), pypto.DT_INT16)
    return _e2m1_value(byte), _e2m1_value(pypto.bitwise_right_shift(byte, 4))


def pack_nibbles(code: Any) -> Any:
    """INT8 `[M, g / 2]` of FP32 nibbles `[M, g]`: the even element in the low half."""
    return as_byte(pypto.gathermask(code, 1) + pypto.gathermask(code, 2) * 16.0)
