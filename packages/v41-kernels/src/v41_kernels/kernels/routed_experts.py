"""Each row through its expert; the route weight multiplies before the rounding and w2 (model.md section 14.2)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.functions import swiglu
from v41_kernels.kernels.stages.linear import divisor_tile, fp4_product, quantised_rows

ROW_TILE = 1
COLUMN_TILE = 128
# Why: neighbouring rows belong to different experts, so a row walks its expert's packed weights alone, as many outputs
# at a time as in `quantized_linear_fp4`. Rows sorted by expert would share them; their order is the caller's.


def make_entry(*, D: int, I: int, swiglu_limit: float) -> Callable[..., None]:  # noqa: E741 - the contract's symbol
    """The entry for `D` channels and an intermediate size of `I`; the rank's experts lie one after the other."""
    i_tile = divisor_tile(I, COLUMN_TILE)
    d_tile = divisor_tile(D, COLUMN_TILE)

    def routed_experts(
        rows: pypto.Tensor([pypto.DYNAMIC, D], pypto.DT_BF16),
        row_expert_ids: pypto.Tensor([pypto.DYNAMIC], pypto.DT_INT32),
        row_route_weights: pypto.Tensor([pypto.DYNAMIC], pypto.DT_FP32),
        w1: pypto.Tensor([pypto.DYNAMIC, D // 2], pypto.DT_INT8),
        w1_scale: pypto.Tensor([pypto.DYNAMIC, D // 32], pypto.DT_INT8),
        w3: pypto.Tensor([pypto.DYNAMIC, D // 2], pypto.DT_INT8),
        w3_scale: pypto.Tensor([pypto.DYNAMIC, D // 32], pypto.DT_INT8),
        w2: pypto.Tensor([pypto.DYNAMIC, I // 2], pypto.DT_INT8),
        w2_scale: pypto.Tensor([pypto.DYNAMIC, I // 32], pypto.DT_INT8),
        num_rows: pypto.Tensor([1], pypto.DT_INT32),
        expert_start: pypto.Tensor([1], pypto.DT_INT32),
        out: pypto.Tensor([pypto.DYNAMIC, D], pypto.DT_BF16),
    ):
        for row in pypto.loop(num_rows[0], name="ROWS", idx_name="row"):
            expert = row_expert_ids[row] - expert_start[0]
            if expert >= 0:
                hidden = pypto.tensor([1, I], pypto.DT_BF16, "hidden")
                for part in pypto.loop(I // i_tile, name="HIDDEN", idx_name="part"):
                    start = part * i_tile
                    pypto.set_vec_tile_shapes(ROW_TILE, min(D, 512))
                    x_tile = quantised_rows(pypto.view(rows, [1, D], [row, 0]), 1, 1, D)
                    gate = fp4_product(x_tile, 1, 1, w1, w1_scale, expert * I + start, i_tile, D)
                    up = fp4_product(x_tile, 1, 1, w3, w3_scale, expert * I + start, i_tile, D)
                    gate = pypto.cast(pypto.cast(gate, pypto.DT_BF16), pypto.DT_FP32)
                    up = pypto.cast(pypto.cast(up, pypto.DT_BF16), pypto.DT_FP32)
                    weight = pypto.reshape(pypto.view(row_route_weights, [1], [row]), [1, 1])
                    z_tile = swiglu(gate, up, swiglu_limit) * weight
                    pypto.assemble(pypto.cast(z_tile, pypto.DT_BF16), [0, start], hidden)
                for part in pypto.loop(D // d_tile, name="OUTPUTS", idx_name="part"):
                    start = part * d_tile
                    pypto.set_vec_tile_shapes(ROW_TILE, min(I, 512))
                    z_tile = quantised_rows(pypto.view(hidden, [1, I], [0, 0]), 1, 1, I)
                    y_tile = fp4_product(z_tile, 1, 1, w2, w2_scale, expert * D + start, d_tile, I)
                    pypto.assemble(pypto.cast(y_tile, pypto.DT_BF16), [row, start], out)
            else:
                pypto.set_vec_tile_shapes(ROW_TILE, min(D, 512))
                pypto.assemble(pypto.full([1, D], 0.0, pypto.DT_BF16), [row, 0], out)

    return routed_experts
