"""The header of a safetensors file: where each tensor's bytes stand. Encoding, and strict decoding."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from v41_loader.errors import (
    DocumentTooLargeError,
    HeaderSchemaError,
    MalformedJsonError,
    TensorOffsetsError,
    TrailingBytesError,
    TruncatedFileError,
)
from v41_loader.rules import DTYPE_BYTES
from v41_loader.source_files import SourceFile, read_span
from v41_loader.strict_json import MAX_DOCUMENT_BYTES, parse_json_object

_ALIGNMENT = 8
_LENGTH_BYTES = 8
_MAX_DIMENSIONS = 8
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}
_MAX_SIZE = 2**63 - 1
_values_of = itemgetter("dtype", "shape", "data_offsets")
# The library orders tensors by alignment (and so by this rank) first, then by name.
_DTYPE_ORDER = ("F32", "BF16", "F8_E8M0", "F8_E4M3", "I8")


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


def encode_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
) -> tuple[bytes, Mapping[str, TensorEntry]]:
    """The header bytes for `(name, dtype, shape)` tensors, and each tensor's place behind it.

    Byte-identical to `safetensors.torch.save_file(..., metadata={"format": "pt"})`, but known before any data is.
    """
    ordered = sorted(tensors, key=lambda tensor: (_DTYPE_ORDER.index(tensor[1]), tensor[0]))
    document: dict[str, object] = {_METADATA: {"format": "pt"}}
    spans = []
    end = 0
    for name, dtype, shape in ordered:
        begin, end = end, end + math.prod(shape) * DTYPE_BYTES[dtype]
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        spans.append((name, dtype, shape, begin, end))
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    data = _LENGTH_BYTES + len(text)
    entries = {name: TensorEntry(name, dtype, shape, data + a, data + b) for name, dtype, shape, a, b in spans}
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, entries


def read_header(fd: int, source: SourceFile) -> Mapping[str, TensorEntry]:
    """The tensors of an open safetensors file by name, in file order, their offsets checked against the file.

    Every byte of the file belongs to the header or to exactly one tensor.

    Raises:
        DocumentTooLargeError: a header of more than `MAX_DOCUMENT_BYTES`.
        TruncatedFileError: the file ends before its header or data does.
        TrailingBytesError: the file goes on behind its data.
        MalformedJsonError, DuplicateKeyError, HeaderSchemaError: not a safetensors header.
        TensorOffsetsError: overlaps, gaps, or a size that dtype and shape do not give.
    """
    where = source.name
    if source.nbytes < _LENGTH_BYTES:
        raise TruncatedFileError(where, f"{source.nbytes} bytes", "a safetensors header")
    length = int.from_bytes(read_span(fd, source, 0, _LENGTH_BYTES), "little")
    if length > MAX_DOCUMENT_BYTES:
        raise DocumentTooLargeError(f"{where}: header", length, f"at most {MAX_DOCUMENT_BYTES} bytes")
    data = _LENGTH_BYTES + length
    if data > source.nbytes:
        raise TruncatedFileError(where, f"{source.nbytes} bytes", f"a header that ends at byte {data}")
    text = read_span(fd, source, _LENGTH_BYTES, length)
    if not text.startswith(b"{"):
        raise MalformedJsonError(f"{where}: header", text[:1], "a JSON object")
    document = parse_json_object(text, f"{where}: header")
    metadata = document.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderSchemaError(f"{where}: {_METADATA}", metadata, "an object of strings")
    entries = [_entry(name, value, where, data) for name, value in document.items()]
    entries.sort(key=itemgetter(3, 4))  # begin and end
    end = data
    for entry in entries:
        if entry.begin != end:
            raise TensorOffsetsError(f"{entry.name} in {where}", entry.begin - data, f"data from byte {end - data} on")
        end = entry.end
        if end > source.nbytes:
            raise TruncatedFileError(f"{entry.name} in {where}", f"{source.nbytes} bytes", f"data up to byte {end}")
    if end < source.nbytes:
        raise TrailingBytesError(where, f"{source.nbytes} bytes", f"{end} bytes by its header")
    return {entry.name: entry for entry in entries}


def _entry(name: str, value: Any, file: str, data: int) -> TensorEntry:
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        raise HeaderSchemaError(f"{name} in {file}", value, "dtype, shape and data_offsets")
    dtype, shape, offsets = _values_of(value)
    if not isinstance(dtype, str):
        raise HeaderSchemaError(f"{name} in {file}", dtype, "the name of a dtype")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise HeaderSchemaError(f"{name} in {file}", shape, f"a shape of at most {_MAX_DIMENSIONS} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise HeaderSchemaError(f"{name} in {file}", offsets, "two ascending offsets")
    begin, end = offsets
    # A dtype that the release does not use has no size here; it is refused by name when the config is compared.
    item_bytes = DTYPE_BYTES.get(dtype)
    if item_bytes and math.prod(shape) * item_bytes != end - begin:
        expected = f"{math.prod(shape) * item_bytes} bytes for {dtype} {shape}"
        raise TensorOffsetsError(f"{name} in {file}", end - begin, expected)
    return TensorEntry(name, dtype, tuple(shape), data + begin, data + end)


def _are_sizes(value: Any) -> bool:
    if type(value) is not list:
        return False
    for item in value:  # noqa: SIM110 - all() takes twice as long, and this runs for every size of a header
        if type(item) is not int or item < 0 or item > _MAX_SIZE:
            return False
    return True
