"""Transposes matrices of bytes or nibbles, 64 bits at a time.

An element-wise strided copy moves one byte per instruction and misses the cache on every one of them. Here squares of
8x8 bytes, or 16x16 nibbles, are transposed inside machine words (each step exchanges the off-diagonal quarters of
2x2 blocks of lanes, twice as wide as in the step before), and only whole words are moved at the end.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from v41_loader.layouts.layout import Bytes

_WORD = np.dtype("<u8")
"""Little-endian on any machine: lane 0 is the low nibble of the first byte."""

_WORD_BITS = 64
_BLOCK_WORDS, _BLOCK_ROWS = 320, 256
"""What is transposed at a time, and its half of scratch, stays in a core's second-level cache. Narrower blocks cost
more calls, shorter ones move shorter runs at the end."""

_Words = npt.NDArray[np.uint64]


def transpose_lanes(matrix: Bytes, lane_bits: int, out: Bytes) -> None:
    """Write the transpose of a matrix whose lanes (4 or 8 bits, the low nibble first) fill its rows of bytes.

    Args:
        matrix: `[R, C * lane_bits / 8]` bytes; rows are contiguous, R and C multiples of `64 / lane_bits`.
        out: `[C, R * lane_bits / 8]` bytes; rows are contiguous.
    """
    lanes = _WORD_BITS // lane_bits
    rows, row_bytes = matrix.shape
    groups, words = rows // lanes, row_bytes // _WORD.itemsize
    source = matrix.view(_WORD).reshape(groups, lanes, words)
    target = out.view(_WORD).reshape(words, lanes, groups)
    width = min(words, _BLOCK_WORDS)
    step = min(groups, max(1, _BLOCK_ROWS * _BLOCK_WORDS // (lanes * width)))
    squares = np.empty((lanes, step, width), np.uint64)
    scratch = np.empty((lanes // 2, step, width), np.uint64)
    for group in range(0, groups, step):
        for word in range(0, words, width):
            block = source[group : group + step, :, word : word + width]
            height, _, span = block.shape
            held = squares[:, :height, :span]
            _transpose_squares(block, lane_bits, held, scratch[:, :height, :span])
            target[word : word + span, :, group : group + height] = held.transpose(2, 0, 1)


def _transpose_squares(block: _Words, lane_bits: int, out: _Words, scratch: _Words) -> None:
    """`block [groups, lanes, words]` holds a square of lanes x lanes in each column of words; `out` takes them, as
    `[lanes, groups, words]`, transposed. `scratch` is half as large."""
    lanes, *plane = out.shape
    even, odd = block[:, 0::2].transpose(1, 0, 2), block[:, 1::2].transpose(1, 0, 2)
    _exchange(even, odd, out[0::2], out[1::2], lane_bits, scratch)
    distance = 2
    while distance < lanes:
        pairs = out.reshape(lanes // (2 * distance), 2, distance, *plane)
        first, second = pairs[:, 0], pairs[:, 1]
        _exchange(first, second, first, second, distance * lane_bits, scratch.reshape(first.shape))
        distance *= 2


def _exchange(first: _Words, second: _Words, out_first: _Words, out_second: _Words, bits: int, scratch: _Words) -> None:
    """Exchange the odd fields of `first`, each of `bits` bits, with the even fields of `second`."""
    shift = np.uint64(bits)
    even_fields = np.uint64((2**_WORD_BITS - 1) // (2**bits + 1))
    np.right_shift(first, shift, out=scratch)
    np.bitwise_xor(scratch, second, out=scratch)
    np.bitwise_and(scratch, even_fields, out=scratch)
    np.bitwise_xor(second, scratch, out=out_second)
    np.left_shift(scratch, shift, out=scratch)
    np.bitwise_xor(first, scratch, out=out_first)
