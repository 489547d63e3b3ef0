"""Undo the rotation, then each group's projection with BF16 operands (model.md section 13)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable
from typing import Any

import pypto

from v41_kernels.kernels.stages.linear import divisor_tile, fp8_weight, product
from v41_kernels.kernels.stages.rotation import rotated
from v41_kernels.kernels.stages.rows import row_tile

ROW_TILE = 8
COLUMN_TILE = 128
# Why: a group's input is 8 heads of 512 channels; head by head its products add up in FP32 accumulators, so that only
# one head's rows (8 KB) and 128 outputs' decoded weights of it are on chip.


def head_products(
    o: Any, cos: Any, sin: Any, wo_a: Any, wo_a_scale: Any, first: Any, rows: Any,
    head: Any, in_group: int, output: Any, N: int, HEAD_DIM: int, HALF_ROPE: int,
) -> Any:  # fmt: skip
    """FP32 `[R, N]`: what head `head`, the `in_group`-th of its group, adds to outputs `output ...`."""
    plain = HEAD_DIM - 2 * HALF_ROPE
    pypto.set_vec_tile_shapes(ROW_TILE, HEAD_DIM)
    tail = row_tile(o, ROW_TILE, first, rows, 2 * HALF_ROPE, head * HEAD_DIM + plain)
    turned = rotated(pypto.cast(tail, pypto.DT_FP32), cos, sin, HALF_ROPE, ROW_TILE, -1.0)
    weight = fp8_weight(wo_a, wo_a_scale, output, N, HEAD_DIM, in_group * HEAD_DIM)
    total = product(turned, weight[:, plain:HEAD_DIM])
    if plain:
        rest = row_tile(o, ROW_TILE, first, rows, plain, head * HEAD_DIM)
        total = total + product(rest, weight[:, 0:plain])
    pypto.set_vec_tile_shapes(ROW_TILE, N)
    return total


def make_entry(*, H_local: int, HEAD_DIM: int, HALF_ROPE: int, OUTPUTS: int, GROUP_WIDTH: int) -> Callable[..., None]:
    """The entry for `H_local` heads in groups of `GROUP_WIDTH` channels with `OUTPUTS` results in all."""
    width = H_local * HEAD_DIM
    rank = OUTPUTS * GROUP_WIDTH // width
    n_tile = divisor_tile(rank, COLUMN_TILE, 32)

    def grouped_output(
        o: pypto.Tensor([pypto.DYNAMIC, width], pypto.DT_BF16),
        wo_a: pypto.Tensor([OUTPUTS, GROUP_WIDTH], pypto.DT_INT8),
        wo_a_scale: pypto.Tensor([OUTPUTS // 32, GROUP_WIDTH // 32], pypto.DT_INT8),
        rope_cos: pypto.Tensor([pypto.DYNAMIC, HALF_ROPE], pypto.DT_FP32),
        rope_sin: pypto.Tensor([pypto.DYNAMIC, HALF_ROPE], pypto.DT_FP32),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        u: pypto.Tensor([pypto.DYNAMIC, OUTPUTS], pypto.DT_BF16),
    ):
        active = num_tokens[0]
        parts = OUTPUTS * GROUP_WIDTH // width // n_tile
        heads = GROUP_WIDTH // HEAD_DIM
        for tile in pypto.loop((active + ROW_TILE - 1) // ROW_TILE, name="TILES", idx_name="tile"):
            first = tile * ROW_TILE
            rows = pypto.min(active - first, ROW_TILE)
            for part in pypto.loop(OUTPUTS // n_tile, name="OUTPUTS", idx_name="part"):
                pypto.set_vec_tile_shapes(ROW_TILE, 2 * HALF_ROPE)
                cos = row_tile(rope_cos, ROW_TILE, first, rows, HALF_ROPE)
                sin = row_tile(rope_sin, ROW_TILE, first, rows, HALF_ROPE)
                column = part * n_tile
                head = part // parts * heads
                total = head_products(
                    o, cos, sin, wo_a, wo_a_scale, first, rows, head, 0, column, n_tile, HEAD_DIM, HALF_ROPE
                )
                for k in range(1, heads):
                    total = total + head_products(
                        o, cos, sin, wo_a, wo_a_scale, first, rows, head + k, k, column, n_tile, HEAD_DIM, HALF_ROPE
                    )
                pypto.assemble(pypto.cast(total, pypto.DT_BF16), [first, column], u)

    return grouped_output
