"""Index queries, rotated, quantised to FP4 and decoded, with scaled head weights (model.md section 10)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable
from typing import Any

import pypto

from v41_kernels.kernels.stages.linear import fp8_product, quantised_rows
from v41_kernels.kernels.stages.projections import bf16_projection
from v41_kernels.kernels.stages.quantisers import MX_GROUP, groups_of, quantised_index
from v41_kernels.kernels.stages.rotation import write_rotated
from v41_kernels.kernels.stages.rows import row_tile

ROW_TILE = 8
COLUMN_TILE = 512
# Why: as in `q_proj_rope`, a tile of outputs is one head (128 channels); it is quantised where it was rotated.


def fp4_and_back(head: Any, R: int, rows: Any, width: int) -> Any:
    """BF16 `[R, width]` of a rotated head, quantised in groups of 32."""
    pypto.set_vec_tile_shapes(R, width)
    groups = groups_of(pypto.cast(head, pypto.DT_FP32), R, rows, width, MX_GROUP)
    return pypto.reshape(quantised_index(groups), [R, width], valid_shape=[rows, width])


def make_entry(*, D: int, Q_LORA: int, INDEX_HEADS: int, INDEX_DIM: int, HALF_ROPE: int) -> Callable[..., None]:
    """The entry for `INDEX_HEADS` heads of `INDEX_DIM` channels; the heads of a token lie side by side."""
    width = INDEX_HEADS * INDEX_DIM
    weight_scale = INDEX_DIM**-0.5 * INDEX_HEADS**-0.5

    def index_queries(
        qr: pypto.Tensor([pypto.DYNAMIC, Q_LORA], pypto.DT_BF16),
        x: pypto.Tensor([pypto.DYNAMIC, D], pypto.DT_BF16),
        index_wq_b: pypto.Tensor([width, Q_LORA], pypto.DT_INT8),
        index_wq_b_scale: pypto.Tensor([width // 32, Q_LORA // 32], pypto.DT_INT8),
        index_weights_proj: pypto.Tensor([INDEX_HEADS, D], pypto.DT_BF16),
        rope_cos: pypto.Tensor([pypto.DYNAMIC, HALF_ROPE], pypto.DT_FP32),
        rope_sin: pypto.Tensor([pypto.DYNAMIC, HALF_ROPE], pypto.DT_FP32),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        index_q: pypto.Tensor([pypto.DYNAMIC, width], pypto.DT_BF16),
        index_weights: pypto.Tensor([pypto.DYNAMIC, INDEX_HEADS], pypto.DT_BF16),
    ):
        active = num_tokens[0]
        for tile in pypto.loop((active + ROW_TILE - 1) // ROW_TILE, name="TILES", idx_name="tile"):
            first = tile * ROW_TILE
            rows = pypto.min(active - first, ROW_TILE)
            pypto.set_vec_tile_shapes(ROW_TILE, min(D, COLUMN_TILE))
            weight = bf16_projection(row_tile(x, ROW_TILE, first, rows, D), index_weights_proj, ROW_TILE, INDEX_HEADS)
            weight = pypto.cast(weight, pypto.DT_FP32) * weight_scale
            pypto.assemble(pypto.cast(weight, pypto.DT_BF16), [first, 0], index_weights)
            pypto.set_vec_tile_shapes(ROW_TILE, min(Q_LORA, COLUMN_TILE))
            qr_tile = quantised_rows(row_tile(qr, ROW_TILE, first, rows, Q_LORA), ROW_TILE, rows, Q_LORA)
            for head in pypto.loop(width // INDEX_DIM, name="HEADS", idx_name="head"):
                column = head * INDEX_DIM
                q_tile = fp8_product(qr_tile, ROW_TILE, rows, index_wq_b, index_wq_b_scale, column, INDEX_DIM, Q_LORA)
                pypto.set_vec_tile_shapes(ROW_TILE, INDEX_DIM)
                q_tile = pypto.cast(q_tile, pypto.DT_BF16)
                cos = row_tile(rope_cos, ROW_TILE, first, rows, HALF_ROPE)
                sin = row_tile(rope_sin, ROW_TILE, first, rows, HALF_ROPE)
                turned = pypto.tensor([ROW_TILE, INDEX_DIM], pypto.DT_BF16, "turned")
                write_rotated(q_tile, cos, sin, turned, 0, 0, ROW_TILE, INDEX_DIM, HALF_ROPE)
                for _once in pypto.loop(1, name="QUANTISE", idx_name="once"):
                    decoded = fp4_and_back(row_tile(turned, ROW_TILE, 0, rows, INDEX_DIM), ROW_TILE, rows, INDEX_DIM)
                    pypto.set_vec_tile_shapes(ROW_TILE, INDEX_DIM)
                    pypto.assemble(decoded, [first, column], index_q)

    return index_queries
