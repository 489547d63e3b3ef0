"""The expert that every token takes, without route weight (model.md section 14.2)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.functions import swiglu
from v41_kernels.kernels.stages.linear import fp8_product, output_tile, quantised_rows
from v41_kernels.kernels.stages.rows import row_tile

ROW_TILE = 8
COLUMN_TILE = 1024
# Why: as in `quantized_linear`. The SwiGLU results of a row tile (8 x 2,304 BF16, 36 KB) stay on chip between the two
# products.


def make_entry(*, D: int, I: int, swiglu_limit: float) -> Callable[..., None]:  # noqa: E741 - the contract's symbol
    """The entry for `D` channels and an intermediate size of `I`."""
    i_tile, d_tile = output_tile(I, D, COLUMN_TILE), output_tile(D, I, COLUMN_TILE)

    def shared_expert(
        x: pypto.Tensor([pypto.DYNAMIC, D], pypto.DT_BF16),
        shared_w1: pypto.Tensor([I, D], pypto.DT_INT8),
        shared_w1_scale: pypto.Tensor([I // 32, D // 32], pypto.DT_INT8),
        shared_w3: pypto.Tensor([I, D], pypto.DT_INT8),
        shared_w3_scale: pypto.Tensor([I // 32, D // 32], pypto.DT_INT8),
        shared_w2: pypto.Tensor([D, I], pypto.DT_INT8),
        shared_w2_scale: pypto.Tensor([D // 32, I // 32], pypto.DT_INT8),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        out: pypto.Tensor([pypto.DYNAMIC, D], pypto.DT_BF16),
    ):
        active = num_tokens[0]
        for tile in pypto.loop((active + ROW_TILE - 1) // ROW_TILE, name="TILES", idx_name="tile"):
            first = tile * ROW_TILE
            rows = pypto.min(active - first, ROW_TILE)
            pypto.set_vec_tile_shapes(ROW_TILE, min(D, 512))
            x_tile = quantised_rows(row_tile(x, ROW_TILE, first, rows, D), ROW_TILE, rows, D)
            hidden = pypto.tensor([ROW_TILE, I], pypto.DT_BF16, "hidden")
            for part in pypto.loop(I // i_tile, name="HIDDEN", idx_name="part"):
                start = part * i_tile
                gate = fp8_product(x_tile, ROW_TILE, rows, shared_w1, shared_w1_scale, start, i_tile, D)
                up = fp8_product(x_tile, ROW_TILE, rows, shared_w3, shared_w3_scale, start, i_tile, D)
                pypto.set_vec_tile_shapes(ROW_TILE, i_tile)
                gate = pypto.cast(pypto.cast(gate, pypto.DT_BF16), pypto.DT_FP32)
                up = pypto.cast(pypto.cast(up, pypto.DT_BF16), pypto.DT_FP32)
                pypto.assemble(pypto.cast(swiglu(gate, up, swiglu_limit), pypto.DT_BF16), [0, start], hidden)
            for part in pypto.loop(D // d_tile, name="OUTPUTS", idx_name="part"):
                start = part * d_tile
                pypto.set_vec_tile_shapes(ROW_TILE, min(I, 512))
                z_tile = quantised_rows(pypto.view(hidden, [ROW_TILE, I], [0, 0]), ROW_TILE, ROW_TILE, I)
                y_tile = fp8_product(z_tile, ROW_TILE, ROW_TILE, shared_w2, shared_w2_scale, start, d_tile, I)
                pypto.set_vec_tile_shapes(ROW_TILE, d_tile)
                valid = row_tile(y_tile, ROW_TILE, 0, rows, d_tile)
                pypto.assemble(pypto.cast(valid, pypto.DT_BF16), [first, start], out)

    return shared_expert
