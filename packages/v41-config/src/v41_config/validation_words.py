"""What pydantic refuses, as the parts of a `V41Error`."""

from __future__ import annotations

from pydantic import ValidationError


def first_refusal(error: ValidationError, whole: str) -> tuple[str, object, str]:
    """The first thing refused: where, found and expected, in our words where pydantic's would read badly.

    Args:
        whole: the name of the whole input, for a refusal that is of no field.
    """
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"])) or whole
    if first["type"] == "missing":
        return where, None, "a value"
    if first["type"] == "extra_forbidden":
        return where, first["input"], "no such field"
    return where, first["input"], first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
