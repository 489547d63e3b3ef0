"""FP8 activations, quantised here, times FP8 weights (model.md section 2.8)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.linear import fp8_product, output_tile, quantised_rows
from v41_kernels.kernels.stages.rows import row_tile

ROW_TILE = 8
COLUMN_TILE = 1024
# Why: a row tile is quantised once and serves all output tiles; 8 x 1,024 FP32 are 32 KB. Of many inputs fewer outputs
# are made at a time (`output_tile`), 128 of 5,120; each 32 x 32 block of weights has one scale.


def make_entry(*, N: int, K: int, exact_type: str = "DT_BF16") -> Callable[..., None]:
    """The entry for weights `[N, K]`; `exact_type` is the dtype of the result."""
    n_tile = output_tile(N, K, COLUMN_TILE)
    result = getattr(pypto, exact_type)

    def quantized_linear(
        x: pypto.Tensor([pypto.DYNAMIC, K], pypto.DT_BF16),
        w: pypto.Tensor([N, K], pypto.DT_INT8),
        w_scale: pypto.Tensor([N // 32, K // 32], pypto.DT_INT8),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        out: pypto.Tensor([pypto.DYNAMIC, N], result),
    ):
        active = num_tokens[0]
        for tile in pypto.loop((active + ROW_TILE - 1) // ROW_TILE, name="TILES", idx_name="tile"):
            first = tile * ROW_TILE
            rows = pypto.min(active - first, ROW_TILE)
            pypto.set_vec_tile_shapes(ROW_TILE, min(K, 512))
            x_tile = quantised_rows(row_tile(x, ROW_TILE, first, rows, K), ROW_TILE, rows, K)
            for part in pypto.loop(N // n_tile, name="OUTPUTS", idx_name="part"):
                column = part * n_tile
                y_tile = fp8_product(x_tile, ROW_TILE, rows, w, w_scale, column, n_tile, K)
                pypto.set_vec_tile_shapes(ROW_TILE, n_tile)
                pypto.assemble(pypto.cast(y_tile, result), [first, column], out)

    return quantized_linear
