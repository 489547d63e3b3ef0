"""The ranges of single config fields: as annotated types, generous around the release, and no more than can be served.

A config comes from a stranger. Without an upper bound a file of four kilobytes can ask for two billion Sinkhorn
iterations or a table of 2^31 positions, and the answer would be a hang or a lack of memory instead of an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

INT32_MAX = 2**31 - 1
"""Sizes stay below it: positions, token ids and physical rows are INT32."""

Size = Annotated[int, Field(gt=0, le=INT32_MAX)]
Id = Annotated[int, Field(ge=0, le=INT32_MAX)]
Width = Annotated[int, Field(gt=0, le=1 << 17)]
"""Of one row of something: channels, ranks. The release has at most 5120."""
Heads = Annotated[int, Field(gt=0, le=1 << 12)]
Layers = Annotated[int, Field(gt=0, le=1 << 12)]
Experts = Annotated[int, Field(gt=0, le=1 << 16)]
Vocabulary = Annotated[int, Field(gt=0, le=1 << 24)]
Positions = Annotated[int, Field(gt=0, le=1 << 24)]
"""Sixteen times the release's context: a RoPE table of them still fits a machine."""
Entries = Annotated[int, Field(gt=0, le=1 << 16)]
"""That one query attends to, or chooses from: window, top k, candidate blocks."""
CandidateBlock = Annotated[int, Field(gt=0, le=1 << 12)]
Streams = Annotated[int, Field(gt=0, le=1 << 5)]
Iterations = Annotated[int, Field(gt=0, le=1 << 10)]


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


IntTuple = Annotated[tuple[int, ...], BeforeValidator(_as_tuple)]
IdTuple = Annotated[tuple[Id, ...], BeforeValidator(_as_tuple)]
SizeTuple = Annotated[tuple[Size, ...], BeforeValidator(_as_tuple)]


def _finite(value: object) -> object:
    """Before the union with its two messages: an int or float, not NaN, infinite or beyond a double."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise ValueError("a finite number")
    return value


def _within(least: float, most: float) -> Callable[[float], float]:
    def check(value: float) -> float:
        if value <= 0:
            raise ValueError("a number above 0")
        if not least <= value <= most:
            raise ValueError(f"a number from {least:g} to {most:g}")
        return value

    return check


def _schema(least: float, most: float) -> dict[str, Any]:
    return {"type": "number", "minimum": least, "maximum": most}


_EPSILON = (2.0**-126, 1.0)
_FACTOR = (2.0**-20, 2.0**20)
_ROPE_BASE = (2.0**-20, 2.0**40)

# Not simply `float`: the file is written back as it was read, and 10000 is not 10000.0 there.
Number = Annotated[int | float, BeforeValidator(_finite), WithJsonSchema({"type": "number"})]
Epsilon = Annotated[
    int | float,
    BeforeValidator(_finite),
    AfterValidator(_within(*_EPSILON)),
    WithJsonSchema(_schema(*_EPSILON)),
]
"""Added before a root or a quotient: a normal FP32 number, for a smaller one is 0 to some hardware."""
Factor = Annotated[
    int | float,
    BeforeValidator(_finite),
    AfterValidator(_within(*_FACTOR)),
    WithJsonSchema(_schema(*_FACTOR)),
]
RopeBase = Annotated[
    int | float,
    BeforeValidator(_finite),
    AfterValidator(_within(*_ROPE_BASE)),
    WithJsonSchema(_schema(*_ROPE_BASE)),
]
