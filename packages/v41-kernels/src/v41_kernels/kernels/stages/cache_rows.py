"""Rows of the paged caches, gathered by their numbers and decoded chunk by chunk (model.md sections 2 and 16).

A number of -1 names no row; row 0 stands in its place and is masked later. Only a chunk is ever decoded.
"""

from typing import Any

import pypto

from v41_kernels.kernels.stages.linear import product
from v41_kernels.kernels.stages.number_formats import decode_e2m1, decode_e4m3, decode_e8m0
from v41_kernels.kernels.stages.quantisers import FP4_GROUP, GROUP_TILE, MX_GROUP
from v41_kernels.kernels.stages.rotation import places


def gathered(tensor: Any, numbers: Any, token: Any, start: Any, count: int, width: int) -> Any:
    """INT8 `[count, width]`: rows `numbers[token, start : start + count]` of a cache."""
    # Why: rows lie anywhere, so each one is a copy of its own; at most 512 bytes fit one tile.
    pypto.set_vec_tile_shapes(1, max(width, 32))
    rows = pypto.tensor([count, width], pypto.DT_INT8, "rows")
    for row in range(count):
        number = pypto.max(numbers[token, start + row], 0)
        pypto.assemble(pypto.clone(pypto.view(tensor, [1, width], [number, 0])), [row, 0], rows)
    return rows


def live_columns(numbers: Any, token: Any, start: Any, count: int) -> Any:
    """FP32 `[1, count]`: 1 where there is a row."""
    pypto.set_vec_tile_shapes(1, max(count, 16))
    cut = pypto.cast(pypto.view(numbers, [1, count], [token, start]), pypto.DT_FP32)
    return pypto.where(pypto.ge(cut, 0.0), 1.0, 0.0)


def factors_of(scales: Any, count: int, groups: int) -> Any:
    """`[count, groups]` decoded scales as `[count * groups, 1]`."""
    return pypto.reshape(scales, [count * groups, 1])


def window_rows(codes: Any, scales: Any, count: int, width: int) -> Any:
    """BF16 `[count, width]` of MXFP8 bytes."""
    groups = width // MX_GROUP
    pypto.set_vec_tile_shapes(count, 32)
    factors = factors_of(decode_e8m0(scales), count, groups)
    pypto.set_vec_tile_shapes(min(count, 16), min(width, 512))
    values = pypto.reshape(decode_e4m3(codes), [count * groups, MX_GROUP])
    pypto.set_vec_tile_shapes(GROUP_TILE, MX_GROUP)
    return pypto.reshape(pypto.cast(values * factors, pypto.DT_BF16), [count, width])


def compressed_rows(packed: Any, scales: Any, count: int, width: int) -> Any:
    """BF16 `[count, width]` of FP4 bytes with E4M3 scales; even and odd channels are put in order by products."""
    groups, half = width // FP4_GROUP, width // 2
    pypto.set_vec_tile_shapes(count, 32)
    factors = factors_of(decode_e4m3(scales), count, groups)
    pypto.set_vec_tile_shapes(min(count, 16), max(half, 32))
    even, odd = decode_e2m1(packed)
    parts = []
    for values in (even, odd):
        pypto.set_vec_tile_shapes(min(count, 16), max(half, 32))
        cut = pypto.reshape(values, [count * groups, FP4_GROUP // 2])
        pypto.set_vec_tile_shapes(GROUP_TILE, FP4_GROUP // 2)
        parts.append(pypto.reshape(pypto.cast(cut * factors, pypto.DT_BF16), [count, half]))
    even_part, odd_part = product(parts[0], places(half, 0)), product(parts[1], places(half, 1))
    pypto.set_vec_tile_shapes(min(count, 16), min(width, 512))
    return pypto.cast(even_part + odd_part, pypto.DT_BF16)
