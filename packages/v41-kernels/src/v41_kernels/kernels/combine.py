"""FP32 sum of a token's expert rows by ascending expert id, then the shared expert (model.md section 14.3)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable
from typing import Any

import pypto

from v41_kernels.kernels.stages.rows import row_tile
from v41_kernels.kernels.stages.tile_shapes import tile_columns

ROW_TILE = 8
COLUMN_TILE = 512
# Why: 8 x 512 FP32 is 16 KB; a round keeps the sum, one expert's row and the row it picks.
NO_ID = 1e9


def pick_round(ids: Any, left: Any) -> tuple[Any, Any]:
    """FP32 masks `[R, K]`: the columns with the lowest id among those left, and those left after it."""
    candidates = pypto.where(pypto.gt(left, 0.5), ids, NO_ID)
    lowest = pypto.amin(candidates, -1, keepdim=True)
    picked = pypto.where(pypto.eq(candidates, lowest), left, 0.0)
    return picked, left - picked


def make_entry(*, D: int, TOPK: int) -> Callable[..., None]:
    """The entry for `TOPK` experts a token and `D` channels."""
    column_tile = tile_columns(D, COLUMN_TILE)

    def combine(
        expert_rows: pypto.Tensor([pypto.DYNAMIC, TOPK * D], pypto.DT_BF16),
        expert_ids: pypto.Tensor([pypto.DYNAMIC, TOPK], pypto.DT_INT32),
        shared: pypto.Tensor([pypto.DYNAMIC, D], pypto.DT_BF16),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        out: pypto.Tensor([pypto.DYNAMIC, D], pypto.DT_BF16),
    ):
        active = num_tokens[0]
        for tile in pypto.loop((active + ROW_TILE - 1) // ROW_TILE, name="TILES", idx_name="tile"):
            first = tile * ROW_TILE
            rows = pypto.min(active - first, ROW_TILE)
            pypto.set_vec_tile_shapes(ROW_TILE, 16)
            ids = pypto.cast(row_tile(expert_ids, ROW_TILE, first, rows, TOPK), pypto.DT_FP32)
            left = pypto.where(pypto.ge(ids, 0.0), 1.0, 0.0)
            picks = []
            for _ in range(TOPK):
                picked, left = pick_round(ids, left)
                picks.append(picked)
            pypto.set_vec_tile_shapes(ROW_TILE, column_tile)
            total = None
            for picked in picks:
                row = None
                for k in range(TOPK):
                    values = pypto.cast(row_tile(expert_rows, ROW_TILE, first, rows, D, k * D), pypto.DT_FP32)
                    # `where`, not a product: the row of a negative id may hold anything.
                    share = pypto.expand_clone(picked[:, k : k + 1], [ROW_TILE, D], valid_shape=[rows, D])
                    values = pypto.where(pypto.gt(share, 0.5), values, 0.0)
                    row = values if row is None else row + values
                total = row if total is None else total + row
            total = total + pypto.cast(row_tile(shared, ROW_TILE, first, rows, D), pypto.DT_FP32)
            pypto.assemble(pypto.cast(total, pypto.DT_BF16), [first, 0], out)

    return combine
