"""FP8 weights input-major: `[N, K]` as released (one row per output) becomes `[K, N]`."""

from __future__ import annotations

import numpy as np

from v41_loader.layouts.lane_transpose import transpose_lanes
from v41_loader.layouts.layout import Bytes


def to_input_major(codes: Bytes) -> Bytes:
    """`[N, K]` one-byte codes as `[K, N]`; N and K are multiples of 8."""
    out = np.empty(codes.shape[::-1], np.uint8)
    transpose_lanes(codes, 8, out)
    return out


def from_input_major(codes: Bytes) -> Bytes:
    """`[K, N]` codes as `[N, K]`: transposing is its own inverse."""
    return to_input_major(codes)
