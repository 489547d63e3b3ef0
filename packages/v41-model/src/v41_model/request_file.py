"""The file of requests that the commands read: ``{"requests": [[token ids], ...]}``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from v41_model.errors import RequestError

__all__ = ["read_request_file"]


class _RequestFile(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    requests: Annotated[list[Annotated[list[int], Field(min_length=1)]], Field(min_length=1)]


_EXPECTED = {
    "missing": '{"requests": [[token ids], ...]}',
    "extra_forbidden": "no key but requests",
    "list_type": "a list",
    "too_short": "at least one entry",
    "int_type": "a token id, an integer",
    "model_type": '{"requests": [[token ids], ...]}',
}
"""What a rule of the form above asks for, by pydantic's name of the rule."""


def read_request_file(path: Path) -> list[list[int]]:
    """The prompts of a request file: at least one, none empty.

    Whether ids are in the vocabulary and prompts short enough is for the model to say
    (:func:`v41_model.generation.check_prompt`). Errors: :class:`RequestError` naming the file and the place in it.
    """
    try:
        content = json.loads(path.read_bytes(), object_pairs_hook=_unique_keys)
    except OSError as error:
        raise RequestError(str(path), error.strerror or str(error), "a readable file of requests") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(str(path), str(error), "JSON in UTF-8") from error
    except _DoubleKeyError as error:
        raise RequestError(f"{path} {error}", "the key twice", "it once") from error
    try:
        return _RequestFile.model_validate(content).requests
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in first["loc"])
        expected = _EXPECTED.get(first["type"], first["msg"])
        raise RequestError(f"{path}{place and ' ' + place.lstrip('.')}", _shown(first["input"]), expected) from error


class _DoubleKeyError(Exception):
    pass


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise _DoubleKeyError(key)
        values[key] = value
    return values


def _shown(value: object) -> object:
    """What was found, short enough for one line."""
    text = repr(value)
    return value if len(text) <= 60 else f"{text[:60]}..."
