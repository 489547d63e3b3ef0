"""Writing: whole or as a typed error, and to the disk before anything is called finished."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from v41_loader.errors import DiskFullError, OutputWriteError

_FLUSH_BYTES = 1 << 20
"""Less than that is left to the end: pages that are still written to would go to the disk twice."""

_CANNOT_RESERVE = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def write_errors(where: str) -> Iterator[None]:
    """Turns what the operating system says about writing into a `DiskFullError` or an `OutputWriteError`."""
    try:
        yield
    except OSError as error:
        kind = DiskFullError if error.errno in _NO_ROOM else OutputWriteError
        raise kind(where, error.strerror, "a file system that takes the bytes") from error


def open_output(path: Path, header: bytes, nbytes: int) -> int:
    """A file of `nbytes` that begins with `header`, open for reading and writing; what it held behind stays.

    Its blocks are reserved, where the file system can do that: a full disk shows before hours of work, and writing to
    reserved blocks costs less.

    Raises:
        DiskFullError, OutputWriteError: it cannot be made.
    """
    with write_errors(str(path)):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            os.ftruncate(fd, nbytes)
            _reserve(fd, nbytes)
            write_at(fd, memoryview(header), 0)
        except BaseException:
            os.close(fd)
            raise
        return fd


def _reserve(fd: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in _CANNOT_RESERVE:
            raise


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """All bytes of `data` at `offset`; an `OSError` where the file system takes no more."""
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def start_flush(fd: int, begin: int, end: int) -> None:
    """Let the kernel begin to write pages between two offsets to the disk, and go on; little is left for `fsync` then.

    What is not needed again is written first: that is what this advice does on Linux.
    """
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    nbytes = end // mmap.PAGESIZE * mmap.PAGESIZE - first
    if nbytes >= _FLUSH_BYTES:
        os.posix_fadvise(fd, first, nbytes, os.POSIX_FADV_DONTNEED)


def read_back(fd: int, offset: int, buffer: memoryview) -> bool:
    """Fill a buffer with bytes that an earlier run may have written; False where the file ends before."""
    while buffer:
        count = os.preadv(fd, [buffer], offset)
        if not count:
            return False
        buffer, offset = buffer[count:], offset + count
    return True


def replace_document(path: Path, staging: Path, data: bytes) -> None:
    """Let a small file appear at once, in its place or instead of its older self; `staging` is on the same disk.

    Raises:
        DiskFullError, OutputWriteError: nothing at `path` has changed.
    """
    with write_errors(str(path)):
        with staging.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, path)
        sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Let the names in a directory survive a loss of power."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
