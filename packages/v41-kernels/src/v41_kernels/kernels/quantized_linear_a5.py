"""`quantized_linear`'s product by the A5's own MX instruction, of codes and scales as they lie in memory.

It compiles for no other architecture, and the interpreter ignores the scales: its values were never seen.
"""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.linear import divisor_tile
from v41_kernels.kernels.stages.quantisers import MX_GROUP
from v41_kernels.kernels.stages.rows import row_tile
from v41_kernels.kernels.stages.tile_shapes import SCALE_PAIR

ROW_TILE = 64
COLUMN_TILE = 128
_INPUT_TILE = 256
# Why: of FP8, 64 x 256 are 16 KB in L0A and 128 x 256 are 32 KB in L0B, which hold 64 KB each, so both are buffered
# twice; 64 x 128 sums are 32 KB in L0C.


def make_entry(*, N: int, K: int, exact_type: str = "DT_BF16") -> Callable[..., None]:
    """The entry for weights `[N, K]`, K a multiple of `SCALE_PAIR`, on the rows that `quantized_activations` gives."""
    n_tile = divisor_tile(N, COLUMN_TILE, MX_GROUP)
    k_tile = divisor_tile(K, _INPUT_TILE, SCALE_PAIR)
    blocks, groups, pairs = n_tile // MX_GROUP, K // MX_GROUP, K // SCALE_PAIR
    result = getattr(pypto, exact_type)

    def quantized_linear_a5(
        codes: pypto.Tensor([pypto.DYNAMIC, K], pypto.DT_FP8E4M3),
        scale: pypto.Tensor([pypto.DYNAMIC, pairs, 2], pypto.DT_FP8E8M0),
        w: pypto.Tensor([N, K], pypto.DT_FP8E4M3),
        w_scale: pypto.Tensor([N // MX_GROUP, groups], pypto.DT_FP8E8M0),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        out: pypto.Tensor([pypto.DYNAMIC, N], result),
    ):
        active = num_tokens[0]
        for tile in pypto.loop((active + ROW_TILE - 1) // ROW_TILE, name="TILES", idx_name="tile"):
            first = tile * ROW_TILE
            rows = pypto.min(active - first, ROW_TILE)
            for part in pypto.loop(N // n_tile, name="OUTPUTS", idx_name="part"):
                # The weights have one scale for 32 outputs, the instruction takes one for each.
                pypto.set_vec_tile_shapes(1, MX_GROUP, max(groups, 32))
                factors = pypto.view(w_scale, [blocks, groups], [part * blocks, 0])
                factors = pypto.expand_clone(pypto.reshape(factors, [blocks, 1, groups]), [blocks, MX_GROUP, groups])
                pypto.set_cube_tile_shapes([ROW_TILE, ROW_TILE], [k_tile, k_tile], [n_tile, n_tile])
                y_tile = pypto.scaled_mm(
                    row_tile(codes, ROW_TILE, first, rows, K),
                    pypto.view(w, [n_tile, K], [part * n_tile, 0]),
                    result,
                    pypto.view(scale, [ROW_TILE, pairs, 2], [first, 0, 0], valid_shape=[rows, pairs, 2]),
                    pypto.reshape(factors, [n_tile, pairs, 2]),
                    b_trans=True,
                    scale_b_trans=True,
                )
                pypto.assemble(y_tile, [first, part * n_tile], out)

    return quantized_linear_a5
