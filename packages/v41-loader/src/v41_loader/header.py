"""The header of a safetensors file: where each tensor's bytes stand. Encoding, and strict decoding of untrusted files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from v41_loader.rules import DTYPE_BYTES

_ALIGNMENT = 8
_LENGTH_BYTES = 8
# The library orders tensors by alignment (and so by this rank) first, then by name.
_DTYPE_ORDER = ("F32", "BF16", "F8_E8M0", "F8_E4M3", "I8")


@dataclass(frozen=True)
class TensorEntry:
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
    document: dict[str, object] = {"__metadata__": {"format": "pt"}}
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
