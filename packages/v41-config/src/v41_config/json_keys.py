"""Objects of untrusted JSON: a key that stands twice means one thing to Python and another to the next reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def unique_object(pairs: list[tuple[str, Any]], error: Callable[[str], Exception]) -> dict[str, Any]:
    """An `object_pairs_hook` of `json`: the object, or the `error` of a key that it has twice."""
    merged = dict(pairs)
    if len(merged) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise error(key)
            seen.add(key)
    return merged
