"""Reading a file that somebody else wrote: neither a device that never ends nor more bytes than it may have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def require_regular(path: Path, error: Callable[[str, object, str], Exception]) -> None:
    """An `error` of where, found and expected for what is there and no regular file, before anyone opens it."""
    if path.exists() and not path.is_file():
        raise error(str(path), "a directory or device", "a regular file")


def read_bounded(path: Path, limit: int, what: str, error: Callable[[str, object, str], Exception]) -> bytes:
    """The bytes of a regular file of at most `limit`; otherwise an `error` of where, found and expected.

    Args:
        what: what it should be, as in "a readable config.json".
    """
    try:
        require_regular(path, error)
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as failure:
        raise error(str(path), failure.strerror or str(failure), f"a readable {what}") from failure
    if len(content) > limit:
        raise error(str(path), "more", f"a {what} of at most {limit} bytes")
    return content
