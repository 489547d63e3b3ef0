"""The embedding in every lane, and a pre-mix of lane zero alone (model.md section 4)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.rows import row_tile
from v41_kernels.kernels.stages.tile_shapes import tile_columns

ROW_TILE = 8
COLUMN_TILE = 2048
# Why: copies alone, so the tile is wide: 8 x 2,048 BF16 is 32 KB, read once and written once per lane.


def make_entry(*, D: int, HC: int) -> Callable[..., None]:
    """The entry for `HC` lanes of `D` channels."""
    column_tile = tile_columns(D, COLUMN_TILE)

    def input_pack(
        embedded: pypto.Tensor([pypto.DYNAMIC, D], pypto.DT_BF16),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        x_hc: pypto.Tensor([pypto.DYNAMIC, HC * D], pypto.DT_BF16),
        pre_mix: pypto.Tensor([pypto.DYNAMIC, HC], pypto.DT_FP32),
    ):
        active = num_tokens[0]
        for tile in pypto.loop((active + ROW_TILE - 1) // ROW_TILE, name="TILES", idx_name="tile"):
            first = tile * ROW_TILE
            rows = pypto.min(active - first, ROW_TILE)
            pypto.set_vec_tile_shapes(ROW_TILE, column_tile)
            row = row_tile(embedded, ROW_TILE, first, rows, D)
            for j in range(HC):
                pypto.assemble(pypto.clone(row), [first, j * D], x_hc)
            pypto.set_vec_tile_shapes(ROW_TILE, 16)
            lane_zero = pypto.full([ROW_TILE, 1], 1.0, pypto.DT_FP32, valid_shape=[rows, 1])
            pypto.assemble(lane_zero, [first, 0], pre_mix)
            others = pypto.full([ROW_TILE, HC - 1], 0.0, pypto.DT_FP32, valid_shape=[rows, HC - 1])
            pypto.assemble(others, [first, 1], pre_mix)

    return input_pack
