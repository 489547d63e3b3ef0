"""Queries of a rank's heads, their last channels rotated (model.md section 8)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.linear import fp8_product, quantised_rows
from v41_kernels.kernels.stages.rotation import write_rotated
from v41_kernels.kernels.stages.rows import row_tile

ROW_TILE = 8
COLUMN_TILE = 512
# Why: a tile of outputs is one head, so that its rotation needs nothing from another tile; 512 x 1,280 decoded BF16
# weights are 1.3 MB, as in `quantized_linear`.


def make_entry(*, Q_LORA: int, H_local: int, HEAD_DIM: int, HALF_ROPE: int) -> Callable[..., None]:
    """The entry for `H_local` heads of `HEAD_DIM` channels; the heads of a token lie side by side."""
    width = H_local * HEAD_DIM

    def q_proj_rope(
        qr: pypto.Tensor([pypto.DYNAMIC, Q_LORA], pypto.DT_BF16),
        wq_b: pypto.Tensor([width, Q_LORA], pypto.DT_INT8),
        wq_b_scale: pypto.Tensor([width // 32, Q_LORA // 32], pypto.DT_INT8),
        rope_cos: pypto.Tensor([pypto.DYNAMIC, HALF_ROPE], pypto.DT_FP32),
        rope_sin: pypto.Tensor([pypto.DYNAMIC, HALF_ROPE], pypto.DT_FP32),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        q: pypto.Tensor([pypto.DYNAMIC, width], pypto.DT_BF16),
    ):
        active = num_tokens[0]
        for tile in pypto.loop((active + ROW_TILE - 1) // ROW_TILE, name="TILES", idx_name="tile"):
            first = tile * ROW_TILE
            rows = pypto.min(active - first, ROW_TILE)
            pypto.set_vec_tile_shapes(ROW_TILE, min(Q_LORA, 512))
            qr_tile = quantised_rows(row_tile(qr, ROW_TILE, first, rows, Q_LORA), ROW_TILE, rows, Q_LORA)
            for head in pypto.loop(width // HEAD_DIM, name="HEADS", idx_name="head"):
                column = head * HEAD_DIM
                y_tile = fp8_product(qr_tile, ROW_TILE, rows, wq_b, wq_b_scale, column, HEAD_DIM, Q_LORA)
                pypto.set_vec_tile_shapes(ROW_TILE, HEAD_DIM)
                y_tile = pypto.cast(y_tile, pypto.DT_BF16)
                cos = row_tile(rope_cos, ROW_TILE, first, rows, HALF_ROPE)
                sin = row_tile(rope_sin, ROW_TILE, first, rows, HALF_ROPE)
                write_rotated(y_tile, cos, sin, q, first, column, ROW_TILE, HEAD_DIM, HALF_ROPE)

    return q_proj_rope
