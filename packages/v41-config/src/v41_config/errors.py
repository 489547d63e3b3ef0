"""The one family of errors that every v41 distribution raises for bad input.

Each error says where it was found, what was found and what was expected; a caller can catch `V41Error`
for all of them or a subclass for one subject. Distributions add subclasses of their own.
"""

from __future__ import annotations


class V41Error(Exception):
    """Bad input: `where` it stands, what was `found` there and what was `expected` instead."""

    def __init__(self, where: str, found: object, expected: str) -> None:
        super().__init__(f"{where}: expected {expected}, found {found!r}")
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
