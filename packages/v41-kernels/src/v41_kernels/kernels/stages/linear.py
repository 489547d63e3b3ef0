"""Products of rows with weights `[N, K]`: quantised activations, FP8 and FP4 weights decoded from their bytes.

Codes times powers of two are exact in BF16, so a cube unit multiplies decoded BF16 tiles and accumulates in FP32
(model.md section 2.8). Weights stay packed in memory; only the tile in work is decoded.
"""

from typing import Any

import pypto

from v41_kernels.kernels.stages.number_formats import decode_e2m1, decode_e4m3, decode_e8m0
from v41_kernels.kernels.stages.quantisers import GROUP_TILE, MX_GROUP, groups_of, quantised_activation
from v41_kernels.kernels.stages.rows import row_tile

WEIGHT_TILE = 128 * 5120
# Why: so many decoded BF16 weights are 1.3 MB, which a cube core streams through L1 in tiles of 128.
_FEW_FACTORS, _MANY_FACTORS = 6144, 16384
# Why: the factors of a tile's groups are a column, which takes a line of 32 bytes each. Few of them are kept in the
# unified buffer, many in memory; the compiler tries to keep what lies between in the buffer, too, and fails.
FP4_CHUNK = 1024
# Why: every FP4 group has a factor of its own, and all are kept in the buffer: 128 KB for 128 rows of 1,024 inputs.


def divisor_tile(size: int, at_most: int, multiple: int = 1) -> int:
    """The largest divisor of `size` that is a multiple of `multiple` and not above `at_most`; else `multiple`."""
    for candidate in range(at_most - at_most % multiple, multiple, -multiple):
        if size % candidate == 0:
            return candidate
    return multiple


def output_tile(N: int, K: int, at_most: int) -> int:
    """How many outputs of an FP8 matrix `[N, K]` are made at a time: a divisor of `N` and a multiple of 32."""
    for candidate in range(min(WEIGHT_TILE // K, at_most) // MX_GROUP * MX_GROUP, MX_GROUP, -MX_GROUP):
        factors = candidate * K // MX_GROUP
        if N % candidate == 0 and not _FEW_FACTORS < factors < _MANY_FACTORS:
            return candidate
    return MX_GROUP


def quantised_rows(tile: Any, R: int, rows: Any, width: int) -> Any:
    """BF16 `[R, width]` quantised to FP8 and back, of a BF16 tile; rows behind the valid ones are zero."""
    values = pypto.cast(tile, pypto.DT_FP32)
    if not isinstance(rows, int):
        values = pypto.fillpad(values, "constant", 0.0)
    return pypto.reshape(quantised_activation(groups_of(values, R, R, width, MX_GROUP)), [R, width])


def fp8_weight(codes: Any, scale: Any, first: Any, N: int, K: int, column: Any = 0) -> Any:
    """BF16 `[N, K]` of rows `first ...` of an E4M3 matrix with a scale for each 32 x 32 block; N a multiple of 32."""
    blocks, groups = N // MX_GROUP, K // MX_GROUP
    values = decode_e4m3(groups_of(pypto.view(codes, [N, K], [first, column]), N, N, K, MX_GROUP))
    pypto.set_vec_tile_shapes(blocks, max(groups, MX_GROUP))
    cut = pypto.view(scale, [blocks, groups], [first // MX_GROUP, column // MX_GROUP])
    factors = pypto.reshape(decode_e8m0(cut), [blocks, 1, groups])
    pypto.set_vec_tile_shapes(1, MX_GROUP, max(groups, MX_GROUP))
    factors = pypto.reshape(pypto.expand_clone(factors, [blocks, MX_GROUP, groups]), [N * groups, 1])
    pypto.set_vec_tile_shapes(GROUP_TILE, MX_GROUP)
    return pypto.reshape(pypto.cast(values * factors, pypto.DT_BF16), [N, K])


def fp4_weight(packed: Any, scale: Any, first: Any, N: int, K: int, column: int = 0) -> tuple[Any, Any]:
    """BF16 `[N, K / 2]` twice, even and odd ones of `K` inputs from `column` on, of rows `first ...` of packed E2M1."""
    groups = K // MX_GROUP
    pypto.set_vec_tile_shapes(min(N, 16), min(-(-K // 64) * 32, 512))
    even, odd = decode_e2m1(pypto.view(packed, [N, K // 2], [first, column // 2]))
    even = groups_of(even, N, N, K // 2, MX_GROUP // 2)
    odd = groups_of(odd, N, N, K // 2, MX_GROUP // 2)
    pypto.set_vec_tile_shapes(N, max(groups, MX_GROUP))
    cut = pypto.view(scale, [N, groups], [first, column // MX_GROUP])
    factors = pypto.reshape(decode_e8m0(cut), [N * groups, 1])
    pypto.set_vec_tile_shapes(GROUP_TILE, MX_GROUP // 2)
    even = pypto.reshape(pypto.cast(even * factors, pypto.DT_BF16), [N, K // 2])
    odd = pypto.reshape(pypto.cast(odd * factors, pypto.DT_BF16), [N, K // 2])
    return even, odd


def product(x: Any, w: Any) -> Any:
    """FP32 `[R, N]` of BF16 (or FP32) tiles `[R, K]` and `[N, K]`."""
    # Why: a cube core's L0A and L0B hold 64 KB each; 16 x 128 and 32 x 128 BF16 are 4 and 8 KB, twice buffered.
    pypto.set_cube_tile_shapes([16, 16], [128, 128], [32, 32])
    return pypto.matmul(x, w, pypto.DT_FP32, b_trans=True)


def fp8_product(x: Any, R: int, rows: Any, codes: Any, scale: Any, first: Any, N: int, K: int) -> Any:
    """FP32 `[R, N]` of quantised rows `x` and `N` rows of an FP8 matrix, which begin at `first`."""
    weight = fp8_weight(codes, scale, first, N, K)
    return product(row_tile(x, R, 0, rows, K), weight)


def fp4_product(x: Any, R: int, rows: Any, packed: Any, scale: Any, first: Any, N: int, K: int) -> Any:
    """The same for a packed FP4 matrix: even and odd inputs apart, as they lie in the bytes, a chunk at a time."""
    total = fp4_chunk_product(x, R, rows, packed, scale, first, N, min(K, FP4_CHUNK), 0)
    for column in range(FP4_CHUNK, K, FP4_CHUNK):
        width = min(K - column, FP4_CHUNK)
        total = total + fp4_chunk_product(x, R, rows, packed, scale, first, N, width, column)
    return total


def fp4_chunk_product(
    x: Any, R: int, rows: Any, packed: Any, scale: Any, first: Any, N: int, width: int, column: int
) -> Any:
    """FP32 `[R, N]`: what `width` inputs from `column` on add to an FP4 product."""
    pypto.set_vec_tile_shapes(R, min(width, 512))
    cut = row_tile(x, R, 0, rows, width, column)
    x_even, x_odd = pypto.gathermask(cut, 1), pypto.gathermask(cut, 2)
    w_even, w_odd = fp4_weight(packed, scale, first, N, width, column)
    total = product(x_even, w_even)
    other = product(x_odd, w_odd)
    pypto.set_vec_tile_shapes(R, max(N, 16))
    return total + other
