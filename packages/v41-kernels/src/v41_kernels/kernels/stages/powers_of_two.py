"""Powers of two and binary logarithms, exactly.

`exp2` cannot be interpreted after the passes, and `log2` may be an ulp off at a power of two.

All of them work element by element on FP32 tiles of any shape.
"""

from typing import Any

import pypto

_LN_2 = 0.6931471805599453
_TWO_BITS = 4194305.0  # 2^22 + 1
_TWO_BITS_OF_HALF = 513.0  # 2^9 + 1


def power_of_two(exponent: Any) -> Any:
    """FP32 `2^exponent` for integers from -64 to 64: an exponential, rounded to two significant bits."""
    near = pypto.exp(exponent * _LN_2)
    shifted = near * _TWO_BITS
    return shifted - (shifted - near)


def half_power_of_two(exponent: Any) -> Any:
    """FP16 `2^exponent` for FP16 integers from -13 to 6, in the same way."""
    near = pypto.exp(exponent * _LN_2)
    shifted = near * _TWO_BITS_OF_HALF
    return shifted - (shifted - near)


def wide_power_of_two(exponent: Any) -> Any:
    """FP32 `2^exponent` for every integer from -127 (subnormal) to 127, as the product of two halves."""
    half = pypto.floor(exponent * 0.5)
    return power_of_two(half) * power_of_two(exponent - half)


def floor_log2(value: Any) -> Any:
    """FP32 `floor(log2(value))` for values from 2^-63 to 2^63."""
    exponent = pypto.round(pypto.log2(value))
    return exponent - pypto.where(pypto.gt(power_of_two(exponent), value), 1.0, 0.0)


def ceil_log2(value: Any) -> Any:
    """FP32 `ceil(log2(value))` for every normal positive value."""
    exponent = pypto.round(pypto.log2(value))
    return exponent + pypto.where(pypto.lt(wide_power_of_two(exponent), value), 1.0, 0.0)
