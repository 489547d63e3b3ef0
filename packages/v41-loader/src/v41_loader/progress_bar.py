"""The bar of long commands: bytes per second and the time left, on a terminal only."""

from __future__ import annotations

from typing import TypeAlias

from tqdm import tqdm

Bar: TypeAlias = "tqdm[None]"


def byte_bar(total: int, what: str) -> Bar:
    """A bar that counts bytes on standard error; nothing where that is a file or a pipe."""
    return tqdm(total=total, unit="B", unit_scale=True, desc=what, disable=None)
