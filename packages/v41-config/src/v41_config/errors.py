"""The one family of errors that every v41 distribution raises for bad input.

Each error says where it was found, what was found and what was expected; a caller can catch `V41Error`
for all of them or a subclass for one subject. Distributions add subclasses of their own.
"""

from __future__ import annotations

import reprlib

_MESSAGE_LIMIT = 600
"""Characters of a found value in a message; the error keeps the value itself."""


class _BoundedRepr(reprlib.Repr):
    """The usual repr of small values; of large ones a part, without first building the whole text."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = self.maxarray = 20
        self.maxstring = self.maxlong = self.maxother = _MESSAGE_LIMIT // 2

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to write out integers of thousands of digits."""
        return f"<an integer of {x.bit_length()} bits>" if x.bit_length() > 1024 else super().repr_int(x, level)

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x) if len(x) <= self.maxstring else f"{x[: self.maxstring]!r}..."


def _bounded(found: object) -> str:
    """Words are shown as they are: code that found no single value says in words what it found."""
    text = found if isinstance(found, str) and _is_words(found) else _BoundedRepr().repr(found)
    return text if len(text) <= _MESSAGE_LIMIT else f"{text[: _MESSAGE_LIMIT - 3]}..."


def _is_words(text: str) -> bool:
    """Printable words with single spaces between them. One word is rather a name, and quoted like any value."""
    return text.isprintable() and " " in text and text == " ".join(text.split())


class V41Error(Exception):
    """Bad input: `where` it stands, what was `found` there and what was `expected` instead."""

    def __init__(self, where: str, found: object, expected: str) -> None:
        super().__init__(f"{where}: expected {expected}, found {_bounded(found)}")
        self.where = where
        self.found = found
        self.expected = expected

    def __reduce__(self) -> tuple[type[V41Error], tuple[str, object, str]]:
        return type(self), (self.where, self.found, self.expected)


class ConfigError(V41Error):
    """A field of a model config breaks a rule; `where` is the field."""


class LayoutError(V41Error):
    """A parallel layout is impossible, or does not divide the model."""


class MetadataError(V41Error):
    """A batch cannot be lowered to `ForwardMetadata`; `where` names request, KV source and logical page."""


class SlabError(V41Error):
    """Token rows that do not fit the token mapping, or stand on the other side of it."""


class OperatorError(V41Error):
    """An argument breaks an operator's contract; `where` names operator and argument."""


class CapacityError(V41Error):
    """A capacity plan was asked for something that cannot be planned; `where` is the quantity."""
