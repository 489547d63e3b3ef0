"""Rotation of the last channels of rows that are already projected: latents before their publication (model.md 7)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.rotation import write_rotated
from v41_kernels.kernels.stages.rows import row_tile

ROW_TILE = 8
COLUMN_TILE = 512
# Why: eight rows of 512 BF16 are 8 KB, and only their last 64 channels are computed on.


def make_entry(*, HEAD_DIM: int, HALF_ROPE: int) -> Callable[..., None]:
    """The entry for rows of `HEAD_DIM` channels."""

    def rotate_rows(
        latent: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM], pypto.DT_BF16),
        compressed_rope_cos: pypto.Tensor([pypto.DYNAMIC, HALF_ROPE], pypto.DT_FP32),
        compressed_rope_sin: pypto.Tensor([pypto.DYNAMIC, HALF_ROPE], pypto.DT_FP32),
        kv: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM], pypto.DT_BF16),
    ):
        groups = latent.shape[0]
        for tile in pypto.loop((groups + ROW_TILE - 1) // ROW_TILE, name="TILES", idx_name="tile"):
            first = tile * ROW_TILE
            rows = pypto.min(groups - first, ROW_TILE)
            pypto.set_vec_tile_shapes(ROW_TILE, min(HEAD_DIM, COLUMN_TILE))
            row = pypto.clone(row_tile(latent, ROW_TILE, first, rows, HEAD_DIM))
            cos = row_tile(compressed_rope_cos, ROW_TILE, first, rows, HALF_ROPE)
            sin = row_tile(compressed_rope_sin, ROW_TILE, first, rows, HALF_ROPE)
            write_rotated(row, cos, sin, kv, first, 0, ROW_TILE, HEAD_DIM, HALF_ROPE)

    return rotate_rows
