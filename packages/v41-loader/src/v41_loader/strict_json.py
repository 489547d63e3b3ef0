"""JSON from untrusted files: bounded, UTF-8, no repeated keys, no numbers that JSON does not have."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, NoReturn

from v41_config.json_keys import unique_object
from v41_loader.errors import DuplicateKeyError, MalformedJsonError

MAX_DOCUMENT_BYTES = 32 << 20
"""More than twice the index or header of the released checkpoint would take as a single file."""


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """The object that a document of at most `MAX_DOCUMENT_BYTES` holds; `where` names it in errors.

    Raises:
        DuplicateKeyError: an object has a key twice (Python would keep the last, other readers the first).
        MalformedJsonError: anything else than one JSON object in UTF-8, or nesting deeper than the parser goes.
    """

    def repeated(key: str) -> DuplicateKeyError:
        return DuplicateKeyError(where, key, "each key once")

    def refuse(constant: str) -> NoReturn:
        raise MalformedJsonError(where, constant, "a number that JSON has")

    try:
        document = json.loads(
            data.decode("utf-8"), object_pairs_hook=partial(unique_object, error=repeated), parse_constant=refuse
        )
    except RecursionError:
        raise MalformedJsonError(where, "too deep a nesting", "objects and lists a few levels deep") from None
    except ValueError as error:  # not UTF-8, not JSON, or an integer of thousands of digits
        raise MalformedJsonError(where, str(error), "a JSON document in UTF-8") from None
    if not isinstance(document, dict):
        raise MalformedJsonError(where, type(document).__name__, "a JSON object")
    return document
