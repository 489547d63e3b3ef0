"""JSON that breaks parsers, or that two parsers would read differently."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from v41_config import TINY
from v41_loader import CheckpointError, open_checkpoint, read_inventory
from v41_loader.errors import DocumentTooLargeError, DuplicateKeyError, IndexSchemaError, MalformedJsonError
from v41_loader.index import INDEX_FILE
from v41_loader.strict_json import MAX_DOCUMENT_BYTES, parse_json_object

BROKEN: list[tuple[bytes, type[CheckpointError]]] = [
    (b"", MalformedJsonError),
    (b"{", MalformedJsonError),
    (b"[]", MalformedJsonError),
    (b"null", MalformedJsonError),
    (b'{"a": 1,}', MalformedJsonError),
    (b'{"a": NaN}', MalformedJsonError),
    (b'{"a": -Infinity}', MalformedJsonError),
    (b'{"a": "\xff"}', MalformedJsonError),
    ('{"a": 1}'.encode("utf-16"), MalformedJsonError),
    (b"[" * 200_000, MalformedJsonError),
    (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, MalformedJsonError),
    (b'{"a": ' + b"9" * 100_000 + b"}", MalformedJsonError),
    (b'{"a": 1, "b": 2, "a": 1}', DuplicateKeyError),
    (b'{"a": {"b": 1, "\\u0062": 2}}', DuplicateKeyError),
]


@pytest.mark.parametrize(("text", "error"), BROKEN, ids=lambda value: repr(value)[:24])
def test_documents_no_two_readers_agree_on(text: bytes, error: type[CheckpointError]) -> None:
    """Not JSON, not an object, numbers JSON lacks, other encodings, endless nesting, repeated keys."""
    with pytest.raises(error, match="the document"):
        parse_json_object(text, "the document")


@pytest.mark.parametrize(("text", "error"), BROKEN[1:2] + BROKEN[9:10] + BROKEN[12:13], ids=["cut", "deep", "twice"])
def test_a_broken_index(damaged: Path, text: bytes, error: type[CheckpointError]) -> None:
    """The same, as the index of a checkpoint."""
    (damaged / INDEX_FILE).write_bytes(text)
    with pytest.raises(error, match=INDEX_FILE):
        open_checkpoint(damaged)


@pytest.mark.parametrize(("text", "error"), BROKEN[1:4] + BROKEN[9:10] + BROKEN[12:13], ids=lambda v: repr(v)[:24])
def test_a_broken_header(write_headers: Callable[..., Path], text: bytes, error: type[CheckpointError]) -> None:
    """The same, as the header of a shard."""
    directory = write_headers(TINY, [])
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(error, match=r"model\.safetensors: header"):
        open_checkpoint(directory)


def test_a_huge_index_is_not_read(damaged: Path) -> None:
    """An index of terabytes: a hole in a sparse file. It is refused by its size, before anything is allocated."""
    with (damaged / INDEX_FILE).open("r+b") as file:
        file.truncate(1 << 40)
    tracemalloc.start()
    with pytest.raises(DocumentTooLargeError, match=INDEX_FILE):
        open_checkpoint(damaged)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20
    assert MAX_DOCUMENT_BYTES < 1 << 40


def test_a_tensor_twice_in_the_index(damaged: Path) -> None:
    """Python keeps the last of two equal keys, other readers the first."""
    text = (damaged / INDEX_FILE).read_text()
    line = next(line for line in text.splitlines() if '"norm.weight"' in line)
    (damaged / INDEX_FILE).write_text(text.replace(line, f"{line.rstrip(',')},\n{line}"))
    with pytest.raises(DuplicateKeyError) as caught:
        open_checkpoint(damaged)
    assert caught.value.found == "norm.weight"


def test_a_tensor_twice_in_a_header(damaged: Path) -> None:
    """The same trick in a safetensors header, with room made for the second entry."""
    path = damaged / "model-00006-of-00006.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    entry = json.dumps(header["norm.weight"], separators=(",", ":"))
    text = data[8 : 8 + length].rstrip(b" ")[:-1] + f',"norm.weight":{entry}}}'.encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(DuplicateKeyError, match=path.name) as caught:
        open_checkpoint(damaged)
    assert caught.value.found == "norm.weight"


@pytest.mark.parametrize("change", [
    {"weight_map": None}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"norm.weight": 3}},
    {"weight_map": {"norm.weight": ["model.safetensors"]}}, {"metadata": []}, {"metadata": {"total_size": "8670256"}},
    {"metadata": {"total_size": True}}, {"metadata": {"total_size": 8670256.0}}, {"more": 1},
], ids=str)  # fmt: skip
def test_an_index_of_another_form(damaged: Path, change: dict[str, object]) -> None:
    """Keys of the wrong type, or keys that an index does not have."""
    index = json.loads((damaged / INDEX_FILE).read_text())
    (damaged / INDEX_FILE).write_text(json.dumps(index | change))
    with pytest.raises(IndexSchemaError, match=INDEX_FILE):
        open_checkpoint(damaged)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


documents = st.fixed_dictionaries({}, optional={"metadata": json_values, "weight_map": json_values, "x": json_values})


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(document=documents)
def test_any_index_gives_one_typed_error(damaged: Path, document: dict[str, object]) -> None:
    """Random documents in place of the index: none of them describes this checkpoint."""
    (damaged / INDEX_FILE).write_text(json.dumps(document))
    with pytest.raises(CheckpointError):
        read_inventory(damaged)
