"""Numbers and token ids that a caller gave: what counts as an integer, and turning them into plain ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsIndex

import numpy as np

from v41_model.errors import RequestError

__all__ = ["as_integer", "checked_integer", "checked_token_ids"]


def checked_integer(where: str, value: object, at_least: int, at_most: int | None = None) -> int:
    """``value`` as a plain integer; NumPy's count, booleans and floats do not.

    Errors: :class:`RequestError`.
    """
    number = as_integer(value)
    if number is None or number < at_least or (at_most is not None and number > at_most):
        end = "" if at_most is None else f" and at most {at_most}"
        raise RequestError(where, value, f"an integer of at least {at_least}{end}")
    return number


def checked_token_ids(where: str, tokens: object, vocab_size: int) -> tuple[int, ...]:
    """A sequence of ids (list, tuple, one-dimensional array or tensor) as plain integers, each in the vocabulary.

    Errors: :class:`RequestError` naming the first position that holds anything else.
    """
    values = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise RequestError(where, tokens, "a sequence of token ids")
    ids = []
    for position, value in enumerate(values):
        number = as_integer(value)
        if number is None or not 0 <= number < vocab_size:
            raise RequestError(f"{where}[{position}]", value, f"0 <= token id < vocab_size = {vocab_size}")
        ids.append(number)
    return tuple(ids)


def as_integer(value: object) -> int | None:
    """A value that is an integer in kind, NumPy's and Torch's scalars included, but no boolean; else None."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, SupportsIndex):
        return None
    try:
        return value.__index__()
    except TypeError:  # a list-like with more than one element, or a tensor of floats
        return None
