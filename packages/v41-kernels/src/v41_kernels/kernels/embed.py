"""Rows of this rank's vocabulary range; -0 for the ids of other ranks (model.md section 4)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.tile_shapes import tile_columns

COLUMN_TILE = 4096
ROW_TILE = 1
# Why: a row per token lies somewhere else in the table, so the work is one copy of a row; 4,096 FP32 are 16 KB.


def make_entry(*, V_local: int, D: int) -> Callable[..., None]:
    """The entry for a range of `V_local` ids and `D` channels."""
    column_tile = tile_columns(D, COLUMN_TILE)

    def embed(
        token_ids: pypto.Tensor([pypto.DYNAMIC], pypto.DT_INT32),
        embed_weight: pypto.Tensor([V_local, D], pypto.DT_BF16),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        vocab_start: pypto.Tensor([1], pypto.DT_INT32),
        embedded_partial: pypto.Tensor([pypto.DYNAMIC, D], pypto.DT_FP32),
    ):
        for token in pypto.loop(num_tokens[0], name="TOKENS", idx_name="token"):
            row = token_ids[token] - vocab_start[0]
            pypto.set_vec_tile_shapes(ROW_TILE, column_tile)
            inside = pypto.max(pypto.min(row, V_local - 1), 0)
            found = pypto.cast(pypto.view(embed_weight, [1, D], [inside, 0]), pypto.DT_FP32)
            if row == inside:
                pypto.assemble(found, [token, 0], embedded_partial)
            else:
                pypto.assemble(pypto.full([1, D], -0.0, pypto.DT_FP32), [token, 0], embedded_partial)

    return embed
