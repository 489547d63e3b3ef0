"""Hyper-connection collapse: the streams weighted by the incoming pre-mix, summed (model.md section 5)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.compensated import compensated_sum
from v41_kernels.kernels.stages.rows import row_tile
from v41_kernels.kernels.stages.tile_shapes import tile_columns

ROW_TILE = 8
COLUMN_TILE = 512
# Why: 8 x 512 FP32 is 16 KB; one product per stream and the two parts of the running sum stay below the 192 KB of a
# 910B vector core's unified buffer. The streams of a token lie side by side, so they are cut as columns of one row.


def make_entry(*, D: int, HC: int) -> Callable[..., None]:
    """The entry for `HC` streams of `D` channels."""
    column_tile = tile_columns(D, COLUMN_TILE)

    def mhc_pre(
        x_hc: pypto.Tensor([pypto.DYNAMIC, HC * D], pypto.DT_BF16),
        pre_mix: pypto.Tensor([pypto.DYNAMIC, HC], pypto.DT_FP32),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        out: pypto.Tensor([pypto.DYNAMIC, D], pypto.DT_BF16),
    ):
        active = num_tokens[0]
        for tile in pypto.loop((active + ROW_TILE - 1) // ROW_TILE, name="TILES", idx_name="tile"):
            first = tile * ROW_TILE
            rows = pypto.min(active - first, ROW_TILE)
            pypto.set_vec_tile_shapes(ROW_TILE, column_tile)
            mix = row_tile(pre_mix, ROW_TILE, first, rows, HC)
            terms = []
            for j in range(HC):
                stream = pypto.cast(row_tile(x_hc, ROW_TILE, first, rows, D, j * D), pypto.DT_FP32)
                terms.append(stream * mix[:, j : j + 1])
            pypto.assemble(pypto.cast(compensated_sum(terms), pypto.DT_BF16), [first, 0], out)

    return mhc_pre
