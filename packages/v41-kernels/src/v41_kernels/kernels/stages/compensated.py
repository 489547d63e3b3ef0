"""Sums, products and roots in FP32 that keep what rounding loses: the goldens' float64 is not on a vector core.

Every function is elementwise on tiles of one shape. Overflow gives NaN instead of infinity.
"""

from typing import Any

import pypto


def two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """FP32 `a + b`, and what its rounding lost (exactly)."""
    total = a + b
    b_part = total - a
    return total, (a - (total - b_part)) + (b - b_part)


def compensated_sum(terms: list[Any]) -> Any:
    """FP32 sum of tiles, rounded once in all but the rarest cases, and never -0."""
    total, lost = compensated_pair(terms)
    return total + lost


def compensated_pair(terms: list[Any]) -> tuple[Any, Any]:
    """The sum of tiles as two FP32 numbers, the second about 2^-24 of the first."""
    if len(terms) == 1:
        return two_sum(terms[0], terms[0] * 0.0)
    total, lost = two_sum(terms[0], terms[1])
    for term in terms[2:]:
        total, lost_here = two_sum(total, term)
        lost = lost + lost_here
    return two_sum(total, lost)


def halves(a: Any) -> tuple[Any, Any]:
    """`a` as the sum of two numbers of 12 bits each, exactly."""
    shifted = a * 4097.0
    high = shifted - (shifted - a)
    return high, a - high


def two_product(a: Any, b: Any) -> tuple[Any, Any]:
    """FP32 `a * b`, and what its rounding lost (exactly)."""
    product = a * b
    a_high, a_low = halves(a)
    b_high, b_low = halves(b)
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def row_sum(values: Any, width: int) -> tuple[Any, Any]:
    """Sum of each row of FP32 values `[R, width]`, not negative, as two numbers `[R, 1]`."""
    return bounded_row_sum(values, pypto.amax(values, -1, keepdim=True), width)


def signed_row_sum(values: Any, width: int) -> tuple[Any, Any]:
    """The same for values of any sign."""
    return bounded_row_sum(values, pypto.amax(pypto.abs(values), -1, keepdim=True), width)


def bounded_row_sum(values: Any, largest: Any, width: int) -> tuple[Any, Any]:
    """Sum of each row of FP32 values `[R, width]` whose magnitudes are at most `largest` `[R, 1]`.

    Adding and subtracting an anchor rounds values to its last place. Such slices have one quantum and so few bits that
    FP32 adds a row of them without rounding, in any order; three leave a rest below 2^-26 of the largest value.
    """
    bits = (width - 1).bit_length()
    anchor = pypto.maximum(largest, 1e-30) * 2.0 ** (bits + 1)
    rest = values
    sums = []
    for _ in range(3):
        upper = (rest + anchor) - anchor
        sums.append(pypto.sum(upper, -1, keepdim=True))
        rest = rest - upper
        anchor = anchor * 2.0 ** (bits - 22)
    sums.append(pypto.sum(rest, -1, keepdim=True))
    return compensated_pair(sums)


def divided(total: Any, lost: Any, divisor: int) -> Any:
    """FP32 `(total + lost) / divisor`; `divisor` has at most 12 significant bits."""
    quotient = total / float(divisor)
    high, low = halves(quotient)
    remainder = ((total - high * float(divisor)) - low * float(divisor)) + lost
    return quotient + remainder / float(divisor)


def inverse_root(value: Any) -> Any:
    """FP32 `1 / sqrt(value)`: one Newton step on the device's `rsqrt`, its residual without rounding."""
    guess = pypto.rsqrt(value)
    once, once_lost = two_product(value, guess)
    twice, twice_lost = two_product(once, guess)
    residual = ((twice * (-1.0) + 1.0) - twice_lost) - once_lost * guess
    return guess + guess * residual * 0.5
