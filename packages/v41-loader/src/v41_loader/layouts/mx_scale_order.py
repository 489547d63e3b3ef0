"""E8M0 scales as `[K/32, N]`, one for 32 K neighbours of each column, in MX_B_NN order.

The scale of K group kg = 2 kp + g and column n = 16 nb + c stands at ((nb * K/64 + kp) * 16 + c) * 2 + g. The pair
of K groups 2 kp and 2 kp + 1 of one column is thus never parted, and is moved as one 16-bit item.
"""

from __future__ import annotations

import numpy as np

from v41_loader.layouts.layout import Bytes

SCALE_COLUMNS = 16
"""Columns of a block (the values of c)."""

SCALE_PAIR = 2
"""K groups that stand side by side (the values of g)."""


def to_mx_scale_order(scales: Bytes, columns_per_row: int) -> Bytes:
    """Released scales as bytes `[N/16, K/64, 16, 2]`.

    Args:
        scales: `[N / columns_per_row, K/32]` codes, contiguous; K/32 is even.
        columns_per_row: columns that share a released row of scales: 1, or a multiple of 16.
    """
    pairs = scales.view(np.uint16)
    rows, width = pairs.shape
    if columns_per_row == 1:
        blocks = pairs.reshape(rows // SCALE_COLUMNS, SCALE_COLUMNS, width).transpose(0, 2, 1)
    else:
        shared = columns_per_row // SCALE_COLUMNS
        blocks = np.broadcast_to(pairs[:, None, :, None], (rows, shared, width, SCALE_COLUMNS))
        blocks = blocks.reshape(rows * shared, width, SCALE_COLUMNS)
    return np.ascontiguousarray(blocks)[..., None].view(np.uint8)


def from_mx_scale_order(blocks: Bytes, columns_per_row: int) -> Bytes | None:
    """Bytes `[N/16, K/64, 16, 2]` as released scales; None where columns that share a scale have different ones."""
    pairs = blocks.view(np.uint16)[..., 0]
    count, width, _ = pairs.shape
    if columns_per_row == 1:
        return np.ascontiguousarray(pairs.transpose(0, 2, 1)).view(np.uint8).reshape(count * SCALE_COLUMNS, -1)
    shared = columns_per_row // SCALE_COLUMNS
    members = pairs.reshape(count // shared, shared, width, SCALE_COLUMNS)
    one_of_each = np.ascontiguousarray(members[:, 0, :, 0])
    if not np.array_equal(members, np.broadcast_to(one_of_each[:, None, :, None], members.shape)):
        return None
    return one_of_each.view(np.uint8)
