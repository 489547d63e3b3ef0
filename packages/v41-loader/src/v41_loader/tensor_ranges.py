"""Reads a range of a stored tensor along one dimension, as bytes."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from v41_loader.header_entries import TensorEntry
from v41_loader.source_files import SourceFile, read_into

BAND_BYTES = 4 << 20
"""Bytes that an inner range is read through at a time; a whole row where one is longer."""


def read_range(
    fd: int, source: SourceFile, entry: TensorEntry, axis: int, start: int, stop: int
) -> npt.NDArray[np.uint8]:
    """The bytes of stored items `[start, stop)` along `axis`, flat, in memory of their own.

    Along the first dimension exactly these bytes are read. Along an inner one whole rows are, band by band, and the
    range is copied out: a system call per row would cost more than the neighbours' bytes.

    Raises:
        SourceChangedError, FileReadError: as `read_into`.
    """
    rows = math.prod(entry.shape[:axis])
    row_bytes = entry.nbytes // rows
    item_bytes = row_bytes // entry.shape[axis]
    begin, width = start * item_bytes, (stop - start) * item_bytes
    out = np.empty((rows, width), np.uint8)
    if rows == 1 or width == row_bytes:
        read_into(fd, source, entry.begin + begin, out.reshape(-1).data)
        return out.reshape(-1)
    band = np.empty((max(1, BAND_BYTES // row_bytes), row_bytes), np.uint8)
    for row in range(0, rows, len(band)):
        whole = band[: rows - row]
        read_into(fd, source, entry.begin + row * row_bytes, whole.reshape(-1).data)
        out[row : row + len(whole)] = whole[:, begin : begin + width]
    return out.reshape(-1)
