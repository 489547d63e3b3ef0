"""Activations as MXFP8: codes and scales in memory, for products that take them as they are (model.md section 2.4)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.linear import divisor_tile
from v41_kernels.kernels.stages.quantisers import MX_GROUP, groups_of, window_bytes
from v41_kernels.kernels.stages.rows import row_tile

ROW_TILE = 8
COLUMN_TILE = 512
# Why: 8 x 512 are 128 groups, one tile of the quantiser; with wider ones the unified buffer overflows.


def make_entry(*, K: int) -> Callable[..., None]:
    """The entry for rows of `K` channels; the quantiser is the window's."""
    width = divisor_tile(K, COLUMN_TILE, MX_GROUP)
    groups = width // MX_GROUP

    def quantized_activations(
        x: pypto.Tensor([pypto.DYNAMIC, K], pypto.DT_BF16),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        codes: pypto.Tensor([pypto.DYNAMIC, K], pypto.DT_INT8),
        scale: pypto.Tensor([pypto.DYNAMIC, K // MX_GROUP], pypto.DT_INT8),
    ):
        active = num_tokens[0]
        for tile in pypto.loop((active + ROW_TILE - 1) // ROW_TILE, name="TILES", idx_name="tile"):
            first = tile * ROW_TILE
            rows = pypto.min(active - first, ROW_TILE)
            for part in pypto.loop(K // width, name="PARTS", idx_name="part"):
                pypto.set_vec_tile_shapes(ROW_TILE, width)
                row = pypto.cast(row_tile(x, ROW_TILE, first, rows, width, part * width), pypto.DT_FP32)
                payload, factors = window_bytes(groups_of(row, ROW_TILE, rows, width, MX_GROUP))
                pypto.set_vec_tile_shapes(ROW_TILE, width)
                payload = pypto.reshape(payload, [ROW_TILE, width], valid_shape=[rows, width])
                pypto.assemble(payload, [first, part * width], codes)
                pypto.set_vec_tile_shapes(ROW_TILE, max(groups, 32))
                factors = pypto.reshape(factors, [ROW_TILE, groups], valid_shape=[rows, groups])
                pypto.assemble(factors, [first, part * groups], scale)

    return quantized_activations
