"""The id of the largest logit, the lowest id where several are equal (model.md section 15)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.rows import column_indices

ROW_TILE = 1
COLUMN_TILE = 2048
# Why: a row of 129,280 logits is walked in tiles of 8 KB; a tile is reduced to one number before the next.


def make_entry(*, V: int) -> Callable[..., None]:
    """The entry for `V` logits a row. An id is an INT64, here as its two halves, the low one first."""

    def greedy(
        logits: pypto.Tensor([pypto.DYNAMIC, V], pypto.DT_FP32),
        num_rows: pypto.Tensor([1], pypto.DT_INT32),
        token_ids: pypto.Tensor([pypto.DYNAMIC, 2], pypto.DT_INT32),
    ):
        for row in pypto.loop(num_rows[0], name="ROWS", idx_name="row"):
            indices = column_indices(V)
            pypto.set_vec_tile_shapes(ROW_TILE, min(-(-V // 16) * 16, COLUMN_TILE))
            scores = pypto.view(logits, [1, V], [row, 0])
            best = pypto.amax(scores, -1, keepdim=True)
            ids = pypto.where(pypto.eq(scores, best), indices, float(V))
            lowest = pypto.amin(ids, -1, keepdim=True)
            pypto.assemble(pypto.cast(lowest, pypto.DT_INT32), [row, 0], token_ids)
            pypto.assemble(pypto.cast(lowest * 0.0, pypto.DT_INT32), [row, 1], token_ids)

    return greedy
