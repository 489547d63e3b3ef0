"""Opening the files of an untrusted checkpoint: plain names, inside its directory, regular, and unchanged since."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from v41_loader.errors import (
    CheckpointNotFoundError,
    DocumentTooLargeError,
    FileReadError,
    LinkEscapeError,
    NotARegularFileError,
    ShardNameError,
    SourceChangedError,
)
from v41_loader.strict_json import MAX_DOCUMENT_BYTES


@dataclass(frozen=True)
class SourceFile:
    """A file as it was when it was checked; `path` has its links resolved."""

    name: str
    path: Path
    device: int
    inode: int
    nbytes: int
    modified_ns: int


def require_unchanged(fd: int, source: SourceFile) -> None:
    """Raise `SourceChangedError` unless an open file is the one that was checked, unwritten since."""
    now = _described(source.name, source.path, os.fstat(fd))
    if now != source:
        raise SourceChangedError(str(source.path), "a file that was replaced or written to", "the file as checked")


def _described(name: str, path: Path, status: os.stat_result) -> SourceFile:
    return SourceFile(name, path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def source_exists(directory: Path, name: str) -> bool:
    """Whether a name stands in the directory, be it a broken link."""
    return os.path.lexists(directory / name)


def require_plain_name(name: str, where: str) -> None:
    """Raise `ShardNameError` unless a name is that of a file in a directory, without any path."""
    if not name or name in (".", "..") or any(c in name for c in "/\\\0"):
        raise ShardNameError(where, name, "a plain file name")


@contextmanager
def open_source(
    directory: Path, name: str, allowed_root: Path | None = None, wanted_for: str = "the checkpoint"
) -> Iterator[tuple[int, SourceFile]]:
    """Open `name` in a checkpoint directory for reading: its file descriptor and description.

    Links are followed as long as they end in the directory, or in `allowed_root` (a Hugging Face cache, say).
    `wanted_for` tells in an error what is missing with the file.

    Raises:
        ShardNameError: not a plain file name.
        LinkEscapeError: a link that ends elsewhere.
        CheckpointNotFoundError: no such file.
        NotARegularFileError: a FIFO, device, socket or directory.
        FileReadError: it cannot be opened.
    """
    require_plain_name(name, str(directory))
    path = Path(os.path.realpath(directory / name))
    roots = [Path(os.path.realpath(root)) for root in (directory, allowed_root) if root is not None]
    if not any(path.is_relative_to(root) for root in roots):
        raise LinkEscapeError(name, str(path), f"a link that ends in {' or '.join(map(str, roots))}")
    try:
        # O_NONBLOCK: a FIFO without a writer must not hang. O_NOFOLLOW: no link may appear after it was resolved.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"{name} in {directory}", "no file", f"a file, for {wanted_for}") from None
    except OSError as error:
        raise FileReadError(name, error.strerror, "a readable file") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise NotARegularFileError(name, stat.filemode(status.st_mode), "a regular file")
        yield fd, _described(name, path, status)
    finally:
        os.close(fd)


@contextmanager
def reopen_source(source: SourceFile) -> Iterator[int]:
    """Open a file that was checked before, for reading from front to back: its file descriptor.

    Raises:
        SourceChangedError: it is not the file that was checked; and what `open_source` raises.
    """
    with open_source(source.path.parent, source.path.name) as (fd, _):
        require_unchanged(fd, source)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # asking for each range ahead costs twice the time
        yield fd


def read_document(directory: Path, name: str, allowed_root: Path | None = None) -> bytes:
    """A whole small file.

    Raises:
        DocumentTooLargeError: more than `MAX_DOCUMENT_BYTES`; and what `open_source` raises.
    """
    with open_source(directory, name, allowed_root) as (fd, source):
        if source.nbytes > MAX_DOCUMENT_BYTES:
            raise DocumentTooLargeError(name, source.nbytes, f"at most {MAX_DOCUMENT_BYTES} bytes")
        return read_span(fd, source, 0, source.nbytes)


def read_span(fd: int, source: SourceFile, begin: int, count: int) -> bytes:
    """Exactly `count` bytes from offset `begin`; errors as `read_into`."""
    buffer = bytearray(count)
    read_into(fd, source, begin, memoryview(buffer))
    return bytes(buffer)


def read_into(fd: int, source: SourceFile, begin: int, buffer: memoryview) -> None:
    """Fill a buffer of bytes from offset `begin`.

    Raises:
        SourceChangedError: the file has become shorter.
        FileReadError: the device failed.
    """
    while buffer:
        try:
            count = os.preadv(fd, [buffer], begin)
        except OSError as error:
            raise FileReadError(f"{source.name} at byte {begin}", error.strerror, "readable bytes") from error
        if not count:
            raise SourceChangedError(source.name, f"an end at byte {begin}", f"{source.nbytes} bytes")
        begin, buffer = begin + count, buffer[count:]
