"""What somebody may have meant by a name that is not there."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], most: int = 1) -> str:
    """` (did you mean X?)` with the known names that look like it, at most so many; empty where none does."""
    near = difflib.get_close_matches(name, known, n=most)
    return f" (did you mean {' or '.join(near)}?)" if near else ""
