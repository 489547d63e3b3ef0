"""The file of requests that the commands read: ``{"requests": [[token ids] or "text", ...]}``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from v41_config.json_keys import read_json
from v41_model.errors import RequestError

__all__ = ["Prompt", "read_request_file"]

Prompt = list[int] | str
"""Token ids, or text for a checkpoint that has a tokenizer."""

MAX_FILE_BYTES = 1 << 30
"""A hundred prompts of a million tokens."""


class _RequestFile(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    requests: Annotated[list[Any], Field(min_length=1)]


_TOKEN_IDS: TypeAdapter[list[int]] = TypeAdapter(
    Annotated[list[int], Field(min_length=1)], config=ConfigDict(strict=True)
)

_FORM = '{"requests": [[token ids] or "text", ...]}'

_EXPECTED = {
    "missing": _FORM,
    "model_type": _FORM,
    "extra_forbidden": "no key but requests",
    "list_type": "a list of token ids, or text",
    "too_short": "at least one entry",
    "int_type": "a token id, an integer",
}
"""What a rule of the form above asks for, by pydantic's name of the rule."""


def read_request_file(path: Path) -> list[Prompt]:
    """The prompts of a request file: at least one, none empty.

    Whether ids are in the vocabulary and prompts short enough is for the model to say
    (:func:`v41_model.request.check_prompt`). Errors: :class:`RequestError` naming the file and the place in it.
    """

    def repeated(key: str) -> RequestError:
        return RequestError(f"{path} {key}", "the key twice", "it once")

    content = read_json(path, MAX_FILE_BYTES, "file of requests", RequestError, repeated=repeated)
    try:
        entries = _RequestFile.model_validate(content).requests
    except ValidationError as error:
        raise _explained(path, error) from error
    return [_prompt(path, index, entry) for index, entry in enumerate(entries)]


def _prompt(path: Path, index: int, entry: object) -> Prompt:
    if isinstance(entry, str) and entry:
        return entry
    try:
        return _TOKEN_IDS.validate_python(entry if entry != "" else [])
    except ValidationError as error:
        raise _explained(path, error, ("requests", index)) from error


def _explained(path: Path, error: ValidationError, before: tuple[str | int, ...] = ()) -> RequestError:
    """The first thing that pydantic refuses, in our words."""
    first = error.errors(include_url=False)[0]
    place = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in (*before, *first["loc"]))
    expected = _EXPECTED.get(first["type"], first["msg"])
    return RequestError(f"{path}{place and ' ' + place.lstrip('.')}", _shown(first["input"]), expected)


def _shown(value: object) -> object:
    """What was found, short enough for one line."""
    text = repr(value)
    return value if len(text) <= 60 else f"{text[:60]}..."
