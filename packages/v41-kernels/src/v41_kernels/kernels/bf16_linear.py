"""Products of BF16 rows with BF16 weights, accumulated in FP32 (model.md section 3)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.linear import divisor_tile, product
from v41_kernels.kernels.stages.rows import row_tile

ROW_TILE = 8
COLUMN_TILE = 512
# Why: nothing is decoded, so the output tile is bounded by the FP32 accumulators alone: 8 x 512 are 16 KB of a cube
# core's 256 KB L0C.


def make_entry(*, N: int, K: int, exact_type: str = "DT_BF16") -> Callable[..., None]:
    """The entry for weights `[N, K]`; `exact_type` is the dtype of the result."""
    n_tile = divisor_tile(N, COLUMN_TILE)
    result = getattr(pypto, exact_type)

    def bf16_linear(
        x: pypto.Tensor([pypto.DYNAMIC, K], pypto.DT_BF16),
        w: pypto.Tensor([N, K], pypto.DT_BF16),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        out: pypto.Tensor([pypto.DYNAMIC, N], result),
    ):
        active = num_tokens[0]
        for tile in pypto.loop((active + ROW_TILE - 1) // ROW_TILE, name="TILES", idx_name="tile"):
            first = tile * ROW_TILE
            rows = pypto.min(active - first, ROW_TILE)
            for part in pypto.loop(N // n_tile, name="OUTPUTS", idx_name="part"):
                column = part * n_tile
                pypto.set_vec_tile_shapes(ROW_TILE, min(K, 512))
                y_tile = product(row_tile(x, ROW_TILE, first, rows, K), pypto.view(w, [n_tile, K], [column, 0]))
                pypto.set_vec_tile_shapes(ROW_TILE, max(n_tile, 16))
                pypto.assemble(pypto.cast(y_tile, result), [first, column], out)

    return bf16_linear
