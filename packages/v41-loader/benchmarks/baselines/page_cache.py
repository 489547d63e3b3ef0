"""Files that are in memory already, and files that are not."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_READ_BYTES = 8 << 20


def make_cold(paths: Iterable[Path]) -> None:
    """Drop what the kernel keeps of the files."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def make_warm(paths: Iterable[Path]) -> None:
    """Read the files once."""
    buffer = bytearray(_READ_BYTES)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
