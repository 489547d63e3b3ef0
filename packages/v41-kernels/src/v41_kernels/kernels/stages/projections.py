"""Projections of a row tile that stays on chip until it is normed."""

from typing import Any

import pypto

from v41_kernels.kernels.stages.linear import fp8_product, output_tile, product, quantised_rows
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


def fp8_projection(x: Any, codes: Any, scale: Any, first: Any, rows: Any, R: int, N: int, K: int, columns: int) -> Any:
    """BF16 `[R, N]`, on chip, of rows `first ...` of BF16 `x` `[T, K]`, quantised, and an FP8 matrix `[N, K]`.

    It is made in tiles of at most `columns` channels. All `R` rows are kept, valid or not.
    """
    n_tile = output_tile(N, K, columns)
    pypto.set_vec_tile_shapes(R, min(K, 512))
    x_tile = quantised_rows(row_tile(x, R, first, rows, K), R, rows, K)
    projected = pypto.tensor([R, N], pypto.DT_BF16, "projected")
    for part in pypto.loop(N // n_tile, name="OUTPUTS", idx_name="part"):
        column = part * n_tile
        y_tile = fp8_product(x_tile, R, rows, codes, scale, column, n_tile, K)
        pypto.set_vec_tile_shapes(R, n_tile)
        pypto.assemble(pypto.cast(y_tile, pypto.DT_BF16), [0, column], projected)
    return projected
