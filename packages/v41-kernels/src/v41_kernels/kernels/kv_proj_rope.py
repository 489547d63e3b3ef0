"""Normed and rotated window KV, one head for keys and values, not yet quantised (model.md section 8)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.projections import fp8_projection, normed
from v41_kernels.kernels.stages.rotation import write_rotated
from v41_kernels.kernels.stages.rows import row_tile

ROW_TILE = 8
COLUMN_TILE = 1024
# Why: as in `q_proj_qr`; a projected row (512 channels) is rotated in the tile in which it is normed.


def make_entry(*, D: int, HEAD_DIM: int, HALF_ROPE: int, eps: float) -> Callable[..., None]:
    """The entry for `D` channels and a head of `HEAD_DIM`."""

    def kv_proj_rope(
        x: pypto.Tensor([pypto.DYNAMIC, D], pypto.DT_BF16),
        wkv: pypto.Tensor([HEAD_DIM, D], pypto.DT_INT8),
        wkv_scale: pypto.Tensor([HEAD_DIM // 32, D // 32], pypto.DT_INT8),
        kv_norm: pypto.Tensor([HEAD_DIM], pypto.DT_BF16),
        rope_cos: pypto.Tensor([pypto.DYNAMIC, HALF_ROPE], pypto.DT_FP32),
        rope_sin: pypto.Tensor([pypto.DYNAMIC, HALF_ROPE], pypto.DT_FP32),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        kv: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM], pypto.DT_BF16),
    ):
        active = num_tokens[0]
        for tile in pypto.loop((active + ROW_TILE - 1) // ROW_TILE, name="TILES", idx_name="tile"):
            first = tile * ROW_TILE
            rows = pypto.min(active - first, ROW_TILE)
            projected = fp8_projection(x, wkv, wkv_scale, first, rows, ROW_TILE, HEAD_DIM, D, COLUMN_TILE)
            for _once in pypto.loop(1, name="NORM", idx_name="once"):
                kv_tile = normed(projected, kv_norm, ROW_TILE, rows, HEAD_DIM, eps)
                cos = row_tile(rope_cos, ROW_TILE, first, rows, HALF_ROPE)
                sin = row_tile(rope_sin, ROW_TILE, first, rows, HALF_ROPE)
                write_rotated(kv_tile, cos, sin, kv, first, 0, ROW_TILE, HEAD_DIM, HALF_ROPE)

    return kv_proj_rope
