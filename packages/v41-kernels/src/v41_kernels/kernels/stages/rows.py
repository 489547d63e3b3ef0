"""Cutting tiles of rows out of tensors, and writing them back."""

from typing import Any

import pypto


def row_tile(tensor: Any, R: int, first: Any, rows: Any, width: int, column: Any = 0) -> Any:
    """`tensor[first : first + rows, column : column + width]` as a tile `[R, width]`."""
    return pypto.view(tensor, [R, width], [first, column], valid_shape=[rows, width])


def vector_row(vector: Any, width: int) -> Any:
    """A vector `[width]` as one row `[1, width]`."""
    return pypto.reshape(vector, [1, width])


def column_indices(width: int) -> Any:
    """FP32 `[1, width]`: 0, 1, ... . The caller's tile has to be set again: a vector is counted in tiles of its own."""
    pypto.set_vec_tile_shapes(width)
    return pypto.reshape(pypto.cast(pypto.arange(width), pypto.DT_FP32), [1, width])
