"""Projections of a row tile that stays on chip until it is normed."""

from typing import Any

import pypto

from v41_kernels.kernels.stages.linear import product
from v41_kernels.kernels.stages.normalisation import normalise
from v41_kernels.kernels.stages.rows import row_tile, vector_row


def normed(projected: Any, norm: Any, R: int, rows: Any, N: int, eps: float) -> Any:
    """BF16 `[R, N]`, normed, of the valid rows of a projection."""
    pypto.set_vec_tile_shapes(R, min(N, 512))
    return normalise(row_tile(projected, R, 0, rows, N), vector_row(norm, N), N, eps)


def bf16_projection(x_tile: Any, w: Any, R: int, N: int) -> Any:
    """BF16 `[R, N]` of a BF16 tile and BF16 weights `[N, K]`."""
    y_tile = product(x_tile, w)
    pypto.set_vec_tile_shapes(R, max(min(N, 512), 16))
    return pypto.cast(y_tile, pypto.DT_BF16)
