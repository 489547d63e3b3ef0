"""Attention output back to the groups' ranks: rotation undone, then each group's projection (model.md section 13)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable
from typing import Any

import pypto

from v41_kernels.kernels.stages.linear import divisor_tile, fp8_weight, product
from v41_kernels.kernels.stages.rope import rotated
from v41_kernels.kernels.stages.rows import row_tile

ROW_TILE = 8
COLUMN_TILE = 64
# Why: the heads of a group (8 x 512 channels) are rotated once for 8 rows, 64 KB in BF16, and serve all of its output
# tiles; 64 outputs keep the decoded weights at 512 KB, which a cube core streams through L1 in tiles of 128.


def turned_back(
    o: Any, rope_cos: Any, rope_sin: Any, first: Any, rows: Any, column: int, heads: int, head_dim: int, half: int
) -> Any:
    """BF16 `[R, heads * head_dim]`: the heads that begin at `column`, their last channels turned back."""
    turned = pypto.tensor([ROW_TILE, heads * head_dim], pypto.DT_BF16, "turned")
    straight = head_dim - 2 * half
    for head in range(heads):
        start = column + head * head_dim
        pypto.set_vec_tile_shapes(ROW_TILE, half)
        cos = row_tile(rope_cos, ROW_TILE, first, rows, half)
        sin = row_tile(rope_sin, ROW_TILE, first, rows, half)
        pairs = row_tile(o, ROW_TILE, first, rows, 2 * half, start + straight)
        pypto.assemble(rotated(pairs, cos, sin, ROW_TILE, half, True), [0, head * head_dim + straight], turned)
        pypto.set_vec_tile_shapes(ROW_TILE, max(straight, 16))
        kept = pypto.clone(row_tile(o, ROW_TILE, first, rows, straight, start))
        pypto.assemble(kept, [0, head * head_dim], turned)
    return turned


def make_entry(
    *, H_local: int, HEAD_DIM: int, HALF_ROPE: int, O_GROUPS_local: int, O_LORA: int
) -> Callable[..., None]:
    """The entry for a rank's heads and output groups."""
    heads = H_local // O_GROUPS_local
    width = heads * HEAD_DIM
    n_tile = divisor_tile(O_LORA, COLUMN_TILE, 32)

    def grouped_output(
        o: pypto.Tensor([pypto.DYNAMIC, O_GROUPS_local * width], pypto.DT_BF16),
        wo_a: pypto.Tensor([O_GROUPS_local * O_LORA, width], pypto.DT_INT8),
        wo_a_scale: pypto.Tensor([O_GROUPS_local * O_LORA // 32, width // 32], pypto.DT_INT8),
        rope_cos: pypto.Tensor([pypto.DYNAMIC, HALF_ROPE], pypto.DT_FP32),
        rope_sin: pypto.Tensor([pypto.DYNAMIC, HALF_ROPE], pypto.DT_FP32),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        u: pypto.Tensor([pypto.DYNAMIC, O_GROUPS_local * O_LORA], pypto.DT_BF16),
    ):
        active = num_tokens[0]
        for tile in pypto.loop((active + ROW_TILE - 1) // ROW_TILE, name="TILES", idx_name="tile"):
            first = tile * ROW_TILE
            rows = pypto.min(active - first, ROW_TILE)
            for group in range(O_GROUPS_local):
                x_tile = turned_back(
                    o, rope_cos, rope_sin, first, rows, group * width, heads, HEAD_DIM, HALF_ROPE
                )
                for part in pypto.loop(O_LORA // n_tile, name=f"OUTPUTS_{group}", idx_name=f"part_{group}"):
                    column = group * O_LORA + part * n_tile
                    weight = fp8_weight(wo_a, wo_a_scale, column, n_tile, width)
                    y_tile = product(row_tile(x_tile, ROW_TILE, 0, rows, width), weight)
                    pypto.set_vec_tile_shapes(ROW_TILE, n_tile)
                    pypto.assemble(pypto.cast(y_tile, pypto.DT_BF16), [first, column], u)

    return grouped_output
