"""Reads parts of a stored tensor block by block: only the bytes that a rank holds, through buffers that are reused."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from v41_loader.header_entries import TensorEntry
from v41_loader.partition import RankPart
from v41_loader.source_files import SourceFile, read_into

Block = npt.NDArray[np.uint8]
"""Rows of a part as bytes, `[rows, bytes of a row]`, contiguous."""

BLOCK_BYTES = 1 << 20
"""Small enough to stay in a core's cache between being read, digested and written; one row where rows are longer."""


class BlockBuffers(threading.local):
    """Buffers of the calling thread: reused up to `BLOCK_BYTES`, of their own where one must be larger."""

    def __init__(self) -> None:
        self._kept: dict[str, Block] = {}

    def block(self, use: str, rows: int, row_bytes: int) -> Block:
        """Uninitialised rows, for as long as no other block is asked for the same use."""
        nbytes = rows * row_bytes
        if nbytes > BLOCK_BYTES:
            return np.empty((rows, row_bytes), np.uint8)
        if use not in self._kept:
            self._kept[use] = np.empty((BLOCK_BYTES,), np.uint8)
        return self._kept[use][:nbytes].reshape(rows, row_bytes)


def part_blocks(
    fd: int,
    source: SourceFile,
    entry: TensorEntry,
    parts: Sequence[RankPart],
    buffers: BlockBuffers,
    rows_per_block: int | None = None,
) -> Iterator[tuple[int, int, Block]]:
    """The blocks of parts of one tensor: (which of `parts`, its first row within the part, bytes).

    The blocks of each part come in row order, `rows_per_block` rows each or as many as fit `BLOCK_BYTES`. A block is
    valid until the next one. `parts` are in the order in which they make up the tensor. Along the first dimension they
    are read one after the other; along the second one, rows are read as far as they belong to a part: whole where every
    part is asked for, else with a system call per row, which costs less than the neighbours' bytes do.

    Raises:
        SourceChangedError, FileReadError: as `read_into`.
    """
    rows, row_bytes = entry.shape[0], entry.nbytes // entry.shape[0]
    if parts[0].axis == 1:
        yield from _column_blocks(fd, source, entry, parts, buffers, rows_per_block)
        return
    step = rows_per_block or max(1, BLOCK_BYTES // row_bytes)
    for number, part in enumerate(parts):
        start, stop = (part.start, part.stop) if part.axis == 0 else (0, rows)
        for row in range(start, stop, step):
            block = buffers.block("read", min(step, stop - row), row_bytes)
            read_into(fd, source, entry.begin + row * row_bytes, block.reshape(-1).data)
            yield number, row - start, block


def _column_blocks(
    fd: int,
    source: SourceFile,
    entry: TensorEntry,
    parts: Sequence[RankPart],
    buffers: BlockBuffers,
    rows_per_block: int | None,
) -> Iterator[tuple[int, int, Block]]:
    rows, columns = entry.shape
    item_bytes = entry.nbytes // (rows * columns)
    row_bytes = columns * item_bytes
    pieces = [(part.start * item_bytes, part.stop * item_bytes) for part in parts]
    runs: list[tuple[int, int]] = []
    for start, stop in pieces:
        joined = bool(runs) and runs[-1][1] == start
        runs[-1:] = [(runs[-1][0], stop)] if joined else [*runs[-1:], (start, stop)]
    width = sum(stop - start for start, stop in runs)
    if width < row_bytes:
        os.posix_fadvise(fd, entry.begin, entry.nbytes, os.POSIX_FADV_WILLNEED)  # else each row waits for the disk
    step = rows_per_block or max(1, BLOCK_BYTES // width)
    for row in range(0, rows, step):
        band = buffers.block("band", min(step, rows - row), width)
        begin = entry.begin + row * row_bytes
        if width == row_bytes:
            read_into(fd, source, begin, band.reshape(-1).data)
        else:
            _read_runs(fd, source, begin, row_bytes, runs, band)
        position = 0
        for number, (start, stop) in enumerate(pieces):
            block = band
            if len(pieces) > 1:
                block = buffers.block("read", len(band), stop - start)
                np.copyto(block, band[:, position : position + stop - start])
            position += stop - start
            yield number, row, block


def _read_runs(
    fd: int, source: SourceFile, begin: int, row_bytes: int, runs: Sequence[tuple[int, int]], band: Block
) -> None:
    """Fill each row of `band` with the runs of bytes of one row after the other, the first of them at `begin`."""
    data, position = band.reshape(-1).data, 0
    for row_begin in range(begin, begin + len(band) * row_bytes, row_bytes):
        for start, stop in runs:
            read_into(fd, source, row_begin + start, data[position : position + stop - start])
            position += stop - start
