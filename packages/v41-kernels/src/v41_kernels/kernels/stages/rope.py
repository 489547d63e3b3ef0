"""Rotation of channel pairs (model.md section 7)."""

from typing import Any

import pypto

from v41_kernels.kernels.stages.rows import column_indices


def rotated(x: Any, cos: Any, sin: Any, R: int, half: int, inverse: bool = False) -> Any:
    """BF16 `[R, 2 * half]` of BF16 `x`, its pairs turned by FP32 `cos` and `sin` `[R, half]`; one rounding.

    `inverse` turns them back. A zero comes out as +0.
    """
    pypto.set_vec_tile_shapes(R, 2 * half)
    values = pypto.cast(x, pypto.DT_FP32)
    even, odd = pypto.gathermask(values, 1), pypto.gathermask(values, 2)
    if inverse:
        turned, other = even * cos + odd * sin, odd * cos - even * sin
    else:
        turned, other = even * cos - odd * sin, even * sin + odd * cos
    return interleaved(pypto.cast(turned, pypto.DT_BF16), pypto.cast(other, pypto.DT_BF16), R, half)


def interleaved(even: Any, odd: Any, R: int, half: int) -> Any:
    """BF16 `[R, 2 * half]` whose pairs are the columns of `even` and `odd`, BF16 `[R, half]`.

    Products with selection matrices: the compiler's own ways of writing every other column (a third axis of two)
    cannot be interpreted after its passes.
    """
    pypto.set_cube_tile_shapes([16, 16], [32, 32], [64, 64])
    placed = pypto.matmul(even, _places(half, 0), pypto.DT_FP32) + pypto.matmul(odd, _places(half, 1), pypto.DT_FP32)
    pypto.set_vec_tile_shapes(R, 2 * half)
    return pypto.cast(placed, pypto.DT_BF16)


def _places(half: int, offset: int) -> Any:
    """BF16 `[half, 2 * half]`: 1 where column = 2 * row + offset."""
    numbers, halves = column_indices(2 * half), column_indices(half)
    pypto.set_vec_tile_shapes(half, 2 * half)
    columns = pypto.expand_clone(numbers, [half, 2 * half])
    rows = pypto.reshape(halves, [half, 1])
    return pypto.cast(pypto.where(pypto.eq(columns - rows * 2.0, float(offset)), 1.0, 0.0), pypto.DT_BF16)
