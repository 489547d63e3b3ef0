"""A row for each choice of an expert: what `dispatch` sends where every expert is here (model.md section 14)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.rows import row_tile
from v41_kernels.kernels.stages.tile_shapes import tile_columns

ROW_TILE = 8
COLUMN_TILE = 2048
# Why: copies alone; a row is read once and written `TOPK` times, 8 x 2,048 BF16 are 32 KB.


def make_entry(*, D: int, TOPK: int) -> Callable[..., None]:
    """The entry for `TOPK` experts a token; the copies of a token lie side by side."""
    column_tile = tile_columns(D, COLUMN_TILE)

    def routed_rows(
        x: pypto.Tensor([pypto.DYNAMIC, D], pypto.DT_BF16),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        rows: pypto.Tensor([pypto.DYNAMIC, TOPK * D], pypto.DT_BF16),
    ):
        active = num_tokens[0]
        for tile in pypto.loop((active + ROW_TILE - 1) // ROW_TILE, name="TILES", idx_name="tile"):
            first = tile * ROW_TILE
            count = pypto.min(active - first, ROW_TILE)
            pypto.set_vec_tile_shapes(ROW_TILE, column_tile)
            row = row_tile(x, ROW_TILE, first, count, D)
            for k in range(TOPK):
                pypto.assemble(pypto.clone(row), [first, k * D], rows)

    return routed_rows
