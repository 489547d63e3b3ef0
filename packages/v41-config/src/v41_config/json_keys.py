"""Untrusted JSON: bounded, UTF-8, and no key twice, which means one thing to Python and another to the next reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from v41_config.bounded_file import read_bounded


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


def read_json(
    path: Path,
    limit: int,
    what: str,
    error: Callable[[str, object, str], Exception],
    form: str = "JSON in UTF-8",
    repeated: Callable[[str], Exception] | None = None,
) -> Any:
    """What a regular file of at most `limit` bytes holds; otherwise an `error` of where, found and expected.

    Args:
        what: what it should be, as in "a readable config.json".
        form: what is expected of a file that is not JSON, not in UTF-8, or nested deeper than the parser goes.
        repeated: the error of a key that an object has twice, where it is not to be that of the path and the key.
    """

    def twice(key: str) -> Exception:
        return error(f"{path}: {key}", "the key twice", "it once")

    content = read_bounded(path, limit, what, error)
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=partial(unique_object, error=repeated or twice))
    except (ValueError, RecursionError) as failure:  # also an integer of thousands of digits
        raise error(str(path), str(failure), form) from None
