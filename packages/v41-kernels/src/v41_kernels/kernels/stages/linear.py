"""Products of rows with weights `[N, K]`: quantised activations, FP8 and FP4 weights decoded from their bytes.

Codes times powers of two are exact in BF16, so a cube unit multiplies decoded BF16 tiles and accumulates in FP32
(model.md section 2.8). Weights stay packed in memory; only the tile in work is decoded.
"""

from typing import Any

import pypto

from v41_kernels.kernels.stages.number_formats import decode_e2m1, decode_e4m3, decode_e8m0
from v41_kernels.kernels.stages.quantisers import GROUP_TILE, MX_GROUP, groups_of, quantised_activation
from v41_kernels.kernels.stages.rows import row_tile


def divisor_tile(size: int, at_most: int, multiple: int = 1) -> int:
    """The largest divisor of `size` that is a multiple of `multiple` and not above `at_most`; else `multiple`."""
    for candidate in range(at_most - at_most % multiple, multiple, -multiple):
        if size % candidate == 0:
            return candidate
    return multiple


def quantised_rows(tile: Any, R: int, rows: Any, width: int) -> Any:
    """BF16 `[R, width]` quantised to FP8 and back, of a BF16 tile."""
    groups = groups_of(pypto.cast(tile, pypto.DT_FP32), R, rows, width, MX_GROUP)
    return pypto.reshape(quantised_activation(groups), [R, width], valid_shape=[rows, width])


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


def fp4_weight(packed: Any, scale: Any, first: Any, N: int, K: int) -> tuple[Any, Any]:
    """BF16 `[N, K / 2]` twice, even and odd inputs, of rows `first ...` of a packed E2M1 matrix."""
    groups = K // MX_GROUP
    pypto.set_vec_tile_shapes(min(N, 16), -(-K // 64) * 32)
    even, odd = decode_e2m1(pypto.view(packed, [N, K // 2], [first, 0]))
    even = groups_of(even, N, N, K // 2, MX_GROUP // 2)
    odd = groups_of(odd, N, N, K // 2, MX_GROUP // 2)
    pypto.set_vec_tile_shapes(N, max(groups, MX_GROUP))
    factors = pypto.reshape(decode_e8m0(pypto.view(scale, [N, groups], [first, 0])), [N * groups, 1])
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
    """The same for a packed FP4 matrix: even and odd inputs apart, as they lie in the bytes."""
    pypto.set_vec_tile_shapes(R, min(K, 512))
    cut = row_tile(x, R, 0, rows, K)
    x_even, x_odd = pypto.gathermask(cut, 1), pypto.gathermask(cut, 2)
    w_even, w_odd = fp4_weight(packed, scale, first, N, K)
    total = product(x_even, w_even)
    other = product(x_odd, w_odd)
    pypto.set_vec_tile_shapes(R, max(N, 16))
    return total + other
