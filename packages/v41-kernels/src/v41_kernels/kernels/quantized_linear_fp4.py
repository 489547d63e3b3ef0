"""FP8 activations, quantised here, times packed FP4 weights (model.md section 2.8)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.linear import divisor_tile, fp4_product, quantised_rows
from v41_kernels.kernels.stages.rows import row_tile

ROW_TILE = 8
COLUMN_TILE = 128
# Why: as in `quantized_linear`, but no more outputs than a chunk's factors leave room for (`FP4_CHUNK`).


def make_entry(*, N: int, K: int) -> Callable[..., None]:
    """The entry for weights `[N, K]`, two elements a byte."""
    n_tile = divisor_tile(N, COLUMN_TILE)

    def quantized_linear_fp4(
        x: pypto.Tensor([pypto.DYNAMIC, K], pypto.DT_BF16),
        w: pypto.Tensor([N, K // 2], pypto.DT_INT8),
        w_scale: pypto.Tensor([N, K // 32], pypto.DT_INT8),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        out: pypto.Tensor([pypto.DYNAMIC, N], pypto.DT_BF16),
    ):
        active = num_tokens[0]
        for tile in pypto.loop((active + ROW_TILE - 1) // ROW_TILE, name="TILES", idx_name="tile"):
            first = tile * ROW_TILE
            rows = pypto.min(active - first, ROW_TILE)
            pypto.set_vec_tile_shapes(ROW_TILE, min(K, 512))
            x_tile = quantised_rows(row_tile(x, ROW_TILE, first, rows, K), ROW_TILE, rows, K)
            for part in pypto.loop(N // n_tile, name="OUTPUTS", idx_name="part"):
                column = part * n_tile
                y_tile = fp4_product(x_tile, ROW_TILE, rows, w, w_scale, column, n_tile, K)
                pypto.assemble(pypto.cast(y_tile, pypto.DT_BF16), [first, column], out)

    return quantized_linear_fp4
