"""Rotary position embedding of the last channels of a tile (model.md section 7)."""

from typing import Any

import pypto

from v41_kernels.kernels.stages.linear import product
from v41_kernels.kernels.stages.rows import column_indices

_PLACES = 8192
# Why: a tile of so many FP32 is 32 KB, and four of them are alive at once.


def places(half: int, odd: int) -> Any:
    """BF16 `[2 * half, half]`: one where pair `column` has its even (odd) member at channel `row`."""
    pairs, channels = column_indices(half), column_indices(2 * half)
    columns = max(half, 16)
    pypto.set_vec_tile_shapes(min(2 * half, _PLACES // columns), columns)
    pairs = pypto.expand_clone(pairs, [2 * half, half])
    channels = pypto.cast(pypto.reshape(channels, [2 * half, 1]), pypto.DT_FP32)
    return pypto.cast(pypto.where(pypto.eq(pairs * 2.0 + float(odd), channels), 1.0, 0.0), pypto.DT_BF16)


def interleaved(even: Any, odd: Any, half: int, R: int) -> Any:
    """BF16 `[R, 2 * half]` of BF16 pairs: products with zeros and ones are exact, and keep a ragged tile's rows."""
    even_part, odd_part = product(even, places(half, 0)), product(odd, places(half, 1))
    pypto.set_vec_tile_shapes(R, 2 * half)
    return pypto.cast(even_part + odd_part, pypto.DT_BF16)


def rotated(values: Any, cos: Any, sin: Any, half: int, R: int, direction: float) -> Any:
    """BF16 `[R, 2 * half]` of FP32 `values`: FP32 rotation, one rounding; `direction` -1 rotates back."""
    pypto.set_vec_tile_shapes(R, 2 * half)
    even, odd = pypto.gathermask(values, 1), pypto.gathermask(values, 2)
    turn = sin * direction
    new_even = pypto.cast(even * cos - odd * turn, pypto.DT_BF16)
    new_odd = pypto.cast(even * turn + odd * cos, pypto.DT_BF16)
    return interleaved(new_even, new_odd, half, R)


def write_rotated(
    tile: Any, cos: Any, sin: Any, out: Any, row: Any, column: Any, R: int, width: int, half: int
) -> None:
    """Writes a BF16 tile `[R, width]` at `out[row, column]`, its last `2 * half` channels rotated."""
    start = width - 2 * half
    values = pypto.cast(tile, pypto.DT_FP32)
    if start:
        pypto.assemble(pypto.clone(tile[:, 0:start]), [row, column], out)
    pypto.assemble(rotated(values[:, start:width], cos, sin, half, R, 1.0), [row, column + start], out)
