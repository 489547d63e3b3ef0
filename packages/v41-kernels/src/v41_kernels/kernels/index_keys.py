"""Normed and rotated index keys of latents, not yet quantised (model.md section 10)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.normalisation import normalise
from v41_kernels.kernels.stages.projections import bf16_projection
from v41_kernels.kernels.stages.rotation import write_rotated
from v41_kernels.kernels.stages.rows import row_tile, vector_row

ROW_TILE = 8
COLUMN_TILE = 512
# Why: a key has 128 channels, so projection, norm and rotation of eight rows are one tile each.


def make_entry(*, HEAD_DIM: int, INDEX_DIM: int, HALF_ROPE: int, eps: float) -> Callable[..., None]:
    """The entry for latents of `HEAD_DIM` and keys of `INDEX_DIM` channels."""

    def index_keys(
        latent: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM], pypto.DT_BF16),
        index_wk: pypto.Tensor([INDEX_DIM, HEAD_DIM], pypto.DT_BF16),
        index_k_norm: pypto.Tensor([INDEX_DIM], pypto.DT_BF16),
        compressed_rope_cos: pypto.Tensor([pypto.DYNAMIC, HALF_ROPE], pypto.DT_FP32),
        compressed_rope_sin: pypto.Tensor([pypto.DYNAMIC, HALF_ROPE], pypto.DT_FP32),
        keys: pypto.Tensor([pypto.DYNAMIC, INDEX_DIM], pypto.DT_BF16),
    ):
        groups = latent.shape[0]
        for tile in pypto.loop((groups + ROW_TILE - 1) // ROW_TILE, name="TILES", idx_name="tile"):
            first = tile * ROW_TILE
            rows = pypto.min(groups - first, ROW_TILE)
            pypto.set_vec_tile_shapes(ROW_TILE, min(HEAD_DIM, COLUMN_TILE))
            projected = bf16_projection(
                row_tile(latent, ROW_TILE, first, rows, HEAD_DIM), index_wk, ROW_TILE, INDEX_DIM
            )
            key = normalise(projected, vector_row(index_k_norm, INDEX_DIM), INDEX_DIM, eps)
            cos = row_tile(compressed_rope_cos, ROW_TILE, first, rows, HALF_ROPE)
            sin = row_tile(compressed_rope_sin, ROW_TILE, first, rows, HALF_ROPE)
            write_rotated(key, cos, sin, keys, first, 0, ROW_TILE, INDEX_DIM, HALF_ROPE)

    return index_keys
