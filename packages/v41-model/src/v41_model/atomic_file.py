"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from v41_model.errors import OutputError

__all__ = ["atomic_file", "require_writable"]


def require_writable(path: Path) -> None:
    """Refuse an output path before the work is done. Errors: :class:`OutputError`."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OutputError(str(path), "a device, FIFO or socket", "a regular file")
    if path.is_dir():
        raise OutputError(str(path), "a directory", "the name of a file")
    if not path.absolute().parent.is_dir():
        raise OutputError(str(path), f"no directory {path.absolute().parent}", "a file in an existing directory")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path``, moved over it when the block succeeds and removed when it does not.

    Errors: :class:`OutputError` for what the file system refuses.
    """
    require_writable(path)
    temporary = path.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # what the umask gives; some writers make files for their owner alone
        yield temporary
        temporary.chmod(mode)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise OutputError(str(path), str(error), "a file that can be written") from error
    finally:
        temporary.unlink(missing_ok=True)
