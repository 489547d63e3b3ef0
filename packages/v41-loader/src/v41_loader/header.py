"""The header of a safetensors file: where each tensor's bytes stand. Encoding, and strict decoding."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from operator import itemgetter

from v41_loader.errors import (
    DocumentTooLargeError,
    HeaderSchemaError,
    MalformedJsonError,
    TensorOffsetsError,
    TrailingBytesError,
    TruncatedFileError,
)
from v41_loader.header_entries import TensorEntry, header_entries
from v41_loader.rules import DTYPE_BYTES
from v41_loader.source_files import SourceFile, read_span
from v41_loader.strict_json import MAX_DOCUMENT_BYTES, parse_json_object

_ALIGNMENT = 8
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_place_of = itemgetter(TensorEntry._fields.index("begin"), TensorEntry._fields.index("end"))
# The library orders tensors by alignment (and so by this rank) first, then by name.
_DTYPE_ORDER = ("F32", "BF16", "F8_E8M0", "F8_E4M3", "I8")


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
    entries = header_entries(document, where, data)
    entries.sort(key=_place_of)
    _require_tiling(entries, source, data)
    return dict(zip(map(itemgetter(0), entries), entries, strict=True))


def _require_tiling(entries: list[TensorEntry], source: SourceFile, data: int) -> None:
    places = list(map(_place_of, entries))
    edges = [data, *map(itemgetter(1), places)]
    if edges[:-1] == list(map(itemgetter(0), places)) and edges[-1] == source.nbytes:
        return
    end = data
    for entry in entries:
        where = f"{entry.name} in {source.name}"
        if entry.begin != end:
            raise TensorOffsetsError(where, entry.begin - data, f"data from byte {end - data} on")
        end = entry.end
        if end > source.nbytes:
            raise TruncatedFileError(where, f"{source.nbytes} bytes", f"data up to byte {end}")
    raise TrailingBytesError(source.name, f"{source.nbytes} bytes", f"{end} bytes by its header")
