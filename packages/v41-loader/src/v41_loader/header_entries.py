"""The entries of a safetensors header, checked: dtype, shape and place of each tensor.

A full-size checkpoint has 96,085 of them. They are looked at all together, column by column, in a third of the time
that one after the other takes; only where something is wrong are they looked at singly, to name the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from operator import eq, itemgetter, sub
from typing import Any, NamedTuple

from v41_loader.errors import HeaderSchemaError, TensorOffsetsError
from v41_loader.rules import DTYPE_BYTES

_MAX_DIMENSIONS = 8
_FIELDS = {"dtype", "shape", "data_offsets"}
_MAX_SIZE = 2**63 - 1
_values_of = itemgetter("dtype", "shape", "data_offsets")


class TensorEntry(NamedTuple):
    """One tensor of a header: `begin` and `end` are file offsets in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def header_entries(document: Mapping[str, Any], file: str, data: int) -> list[TensorEntry]:
    """The entries of a header in its order; `data` is the file offset of the first byte behind it.

    Raises:
        HeaderSchemaError: an entry is not `{dtype, shape, data_offsets}` of the right types.
        TensorOffsetsError: the offsets are not as far apart as dtype and shape say.
    """
    return _sound_entries(document, data) or [single_entry(name, value, file, data) for name, value in document.items()]


def single_entry(name: str, value: Any, file: str, data: int) -> TensorEntry:
    """One entry; errors as `header_entries`."""
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        raise HeaderSchemaError(f"{name} in {file}", value, "dtype, shape and data_offsets")
    dtype, shape, offsets = _values_of(value)
    if not isinstance(dtype, str):
        raise HeaderSchemaError(f"{name} in {file}", dtype, "the name of a dtype")
    if not _are_sizes([shape]) or len(shape) > _MAX_DIMENSIONS:
        raise HeaderSchemaError(f"{name} in {file}", shape, f"a shape of at most {_MAX_DIMENSIONS} sizes")
    if not _are_sizes([offsets]) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise HeaderSchemaError(f"{name} in {file}", offsets, "two ascending offsets")
    begin, end = offsets
    nbytes = _nbytes(dtype, tuple(shape))
    if nbytes not in (None, end - begin):
        raise TensorOffsetsError(f"{name} in {file}", end - begin, f"{nbytes} bytes for {dtype} {shape}")
    return TensorEntry(name, dtype, tuple(shape), data + begin, data + end)


def _sound_entries(document: Mapping[str, Any], data: int) -> list[TensorEntry] | None:
    """The entries; None where there is none, or one is wrong."""
    values = list(document.values())
    if set(map(type, values)) != {dict} or not all(map(eq, map(dict.keys, values), repeat(_FIELDS))):
        return None
    dtypes, shapes, offsets = zip(*map(_values_of, values), strict=True)
    if set(map(type, dtypes)) != {str} or not _are_sizes(shapes) or not _are_sizes(offsets):
        return None
    if max(map(len, shapes)) > _MAX_DIMENSIONS or set(map(len, offsets)) != {2}:
        return None
    begins, ends = zip(*offsets, strict=True)
    shapes = tuple(map(tuple, shapes))
    spans = list(zip(dtypes, shapes, map(sub, ends, begins), strict=True))
    if not all(span >= 0 and _nbytes(dtype, shape) in (None, span) for dtype, shape, span in set(spans)):
        return None
    places = (map(data.__add__, begins), map(data.__add__, ends))
    return list(map(TensorEntry, document, dtypes, shapes, *places))


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """None for a dtype that the release does not use: it is refused by name when the config is compared."""
    item_bytes = DTYPE_BYTES.get(dtype)
    return None if item_bytes is None else math.prod(shape) * item_bytes


def _are_sizes(lists: Sequence[Any]) -> bool:
    """Whether these are lists of integers from 0 to 2^63 - 1."""
    if set(map(type, lists)) != {list}:
        return False
    items = list(chain.from_iterable(lists))
    return set(map(type, items)) <= {int} and min(items, default=0) >= 0 and max(items, default=0) <= _MAX_SIZE
