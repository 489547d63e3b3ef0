"""Every token's normed latent, not rotated (model.md section 9)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.normalisation import normalise
from v41_kernels.kernels.stages.projections import bf16_projection
from v41_kernels.kernels.stages.rows import row_tile, vector_row

ROW_TILE = 8
COLUMN_TILE = 512
# Why: BF16 weights need no decoding, so all 512 channels of a latent are one tile of accumulators (16 KB), which is
# normed where it stands.


def make_entry(*, D: int, HEAD_DIM: int, eps: float) -> Callable[..., None]:
    """The entry for `D` channels and latents of `HEAD_DIM`."""

    def compress_ratio_1(
        x: pypto.Tensor([pypto.DYNAMIC, D], pypto.DT_BF16),
        compressor_wkv: pypto.Tensor([HEAD_DIM, D], pypto.DT_BF16),
        compressor_norm: pypto.Tensor([HEAD_DIM], pypto.DT_BF16),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        latent: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM], pypto.DT_BF16),
    ):
        active = num_tokens[0]
        for tile in pypto.loop((active + ROW_TILE - 1) // ROW_TILE, name="TILES", idx_name="tile"):
            first = tile * ROW_TILE
            rows = pypto.min(active - first, ROW_TILE)
            pypto.set_vec_tile_shapes(ROW_TILE, min(D, COLUMN_TILE))
            projected = bf16_projection(row_tile(x, ROW_TILE, first, rows, D), compressor_wkv, ROW_TILE, HEAD_DIM)
            normed = normalise(projected, vector_row(compressor_norm, HEAD_DIM), HEAD_DIM, eps)
            pypto.assemble(normed, [first, 0], latent)

    return compress_ratio_1
