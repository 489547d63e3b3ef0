"""The file of requests that the commands read: ``{"requests": [[token ids], ...]}``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from v41_model.errors import RequestError

__all__ = ["read_request_file"]


class _RequestFile(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    requests: Annotated[list[Annotated[list[int], Field(min_length=1)]], Field(min_length=1)]


def read_request_file(path: Path) -> list[list[int]]:
    """The prompts of a request file: at least one, none empty.

    Whether ids are in the vocabulary and prompts short enough is for the model to say
    (:func:`v41_model.generation.check_prompt`). Errors: :class:`RequestError` naming the file and the place in it.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RequestError(str(path), error.strerror or str(error), "a readable file of requests") from error
    try:
        return _RequestFile.model_validate_json(content).requests
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in first["loc"])
        expected = f'{{"requests": [[token ids], ...]}}: {first["msg"]}'
        raise RequestError(f"{path}{place and ' ' + place.lstrip('.')}", _shown(first["input"]), expected) from error


def _shown(value: object) -> object:
    """What was found, short enough for one line."""
    text = repr(value)
    return value if len(text) <= 60 else f"{text[:60]}..."
