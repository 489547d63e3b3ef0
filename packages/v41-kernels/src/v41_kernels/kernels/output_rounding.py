"""An attention's FP32 result in BF16: the rounding behind the sum over ranks (model.md section 13)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.rows import row_tile
from v41_kernels.kernels.stages.tile_shapes import tile_columns

ROW_TILE = 8
COLUMN_TILE = 2048
# Why: one conversion per element; 8 x 2,048 FP32 are 64 KB.


def make_entry(*, D: int) -> Callable[..., None]:
    """The entry for rows of `D` channels."""
    column_tile = tile_columns(D, COLUMN_TILE)

    def output_rounding(
        output_partial: pypto.Tensor([pypto.DYNAMIC, D], pypto.DT_FP32),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        attn_output: pypto.Tensor([pypto.DYNAMIC, D], pypto.DT_BF16),
    ):
        active = num_tokens[0]
        for tile in pypto.loop((active + ROW_TILE - 1) // ROW_TILE, name="TILES", idx_name="tile"):
            first = tile * ROW_TILE
            rows = pypto.min(active - first, ROW_TILE)
            pypto.set_vec_tile_shapes(ROW_TILE, column_tile)
            row = row_tile(output_partial, ROW_TILE, first, rows, D)
            pypto.assemble(pypto.cast(row, pypto.DT_BF16), [first, 0], attn_output)

    return output_rounding
