"""Root-mean-square normalisation (model.md section 6)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.normalisation import normalise
from v41_kernels.kernels.stages.tile_shapes import tile_columns

ROW_TILE = 8
COLUMN_TILE = 512
# Why: 8 x 512 FP32 is 16 KB. The stage keeps x, its squares, a slice of them and what is left, the scale and the
# weight, so with the incoming BF16 tile it stays below the 192 KB of a 910B vector core's unified buffer (248 KB on a
# 950). Fewer rows would make more tasks for the same memory traffic.


def make_entry(*, D: int, eps: float) -> Callable[..., None]:
    """The entry for rows of `D` channels."""
    column_tile = tile_columns(D, COLUMN_TILE)

    def rms_norm(
        x: pypto.Tensor([pypto.DYNAMIC, D], pypto.DT_BF16),
        weight: pypto.Tensor([D], pypto.DT_BF16),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        out: pypto.Tensor([pypto.DYNAMIC, D], pypto.DT_BF16),
    ):
        active = num_tokens[0]
        for tile in pypto.loop((active + ROW_TILE - 1) // ROW_TILE, name="TILES", idx_name="tile"):
            first = tile * ROW_TILE
            rows = pypto.min(active - first, ROW_TILE)
            pypto.set_vec_tile_shapes(ROW_TILE, column_tile)
            x_tile = pypto.view(x, [ROW_TILE, D], [first, 0], valid_shape=[rows, D])
            y_tile = normalise(x_tile, pypto.reshape(weight, [1, D]), D, eps)
            pypto.assemble(y_tile, [first, 0], out)

    return rms_norm
