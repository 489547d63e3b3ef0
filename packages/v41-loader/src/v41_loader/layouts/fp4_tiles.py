"""Packed FP4 weights as tiles of the input-major matrix.

The nibbles of `[K, N]` stand in tiles of 256 x 256, ordered (N tile, K tile); a tile is two halves of 128 K rows; a
row is 128 bytes, each with two neighbouring columns, the even one low. Halves and K tiles of one N tile follow each
other without a break, so an N tile is `[K, 128]` bytes and the transposed form of 256 released rows.
"""

from __future__ import annotations

import numpy as np

from v41_loader.layouts.lane_transpose import transpose_lanes
from v41_loader.layouts.layout import Bytes

FP4_TILE = 256
"""Rows and columns of a tile."""

TILE_ROW_BYTES = FP4_TILE // 2


def to_fp4_tiles(packed: Bytes) -> Bytes:
    """Released rows `[N, K/2]`, two K neighbours in a byte, as bytes `[N/256, K, 128]`.

    N is a multiple of 256, K of 256 too (the last K tile would have a hole else).
    """
    rows, row_bytes = packed.shape
    out = np.empty((rows // FP4_TILE, 2 * row_bytes, TILE_ROW_BYTES), np.uint8)
    for tile, target in enumerate(out):
        transpose_lanes(packed[tile * FP4_TILE : (tile + 1) * FP4_TILE], 4, target)
    return out


def from_fp4_tiles(tiles: Bytes) -> Bytes:
    """Bytes `[N/256, K, 128]` as released rows `[N, K/2]`."""
    count, inner, _ = tiles.shape
    out = np.empty((count * FP4_TILE, inner // 2), np.uint8)
    for tile, source in enumerate(tiles):
        transpose_lanes(source, 4, out[tile * FP4_TILE : (tile + 1) * FP4_TILE])
    return out
