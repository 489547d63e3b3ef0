"""Safetensors headers and files that lie about lengths, offsets and shapes."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from v41_loader import CheckpointError, open_checkpoint
from v41_loader.errors import (
    DocumentTooLargeError,
    HeaderSchemaError,
    MalformedJsonError,
    TensorOffsetsError,
    TrailingBytesError,
    TruncatedFileError,
)
from v41_loader.header import read_header
from v41_loader.header_entries import TensorEntry, header_entries, single_entry
from v41_loader.source_files import open_source
from v41_loader.strict_json import MAX_DOCUMENT_BYTES

SHARD = "model-00006-of-00006.safetensors"
Header = dict[str, Any]
ONE = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}


def read_file(path: Path) -> dict[str, TensorEntry]:
    with open_source(path.parent, path.name) as (fd, source):
        return dict(read_header(fd, source))


def write_file(path: Path, header: Header | bytes, payload: int) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(payload))
    return path


@pytest.mark.parametrize(("length", "error"), [
    (0, MalformedJsonError), (1, MalformedJsonError), (2**63, DocumentTooLargeError),
    (2**64 - 1, DocumentTooLargeError), (30_000_000, TruncatedFileError),
])  # fmt: skip
def test_a_header_length_that_is_not_the_headers(damaged: Path, length: int, error: type[CheckpointError]) -> None:
    """Nothing, one byte, sizes beyond any memory, and more than the file holds."""
    with (damaged / SHARD).open("r+b") as file:
        file.write(length.to_bytes(8, "little"))
    with pytest.raises(error, match=SHARD):
        open_checkpoint(damaged)


@pytest.mark.parametrize(("length", "error"), [
    (MAX_DOCUMENT_BYTES, MalformedJsonError), (MAX_DOCUMENT_BYTES + 1, DocumentTooLargeError),
])  # fmt: skip
def test_a_header_as_long_as_the_file_allows(tmp_path: Path, length: int, error: type[CheckpointError]) -> None:
    """A sparse file of a terabyte has room for any header: the bound is ours, not the file's."""
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(length.to_bytes(8, "little") + b"{")
        file.truncate(1 << 40)
    tracemalloc.start()
    with pytest.raises(error, match=r"x\.safetensors: header"):
        read_file(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * MAX_DOCUMENT_BYTES


@pytest.mark.parametrize("size", [0, 7, 8, 100, -1, -4096])
def test_a_truncated_file(damaged: Path, size: int) -> None:
    """Cut inside the length, the header or the data."""
    path = damaged / SHARD
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    with pytest.raises(TruncatedFileError, match=SHARD):
        open_checkpoint(damaged)


@pytest.mark.parametrize("extra", [1, 4096])
def test_bytes_behind_the_data(damaged: Path, extra: int) -> None:
    """A second file smuggled behind the first."""
    with (damaged / SHARD).open("ab") as file:
        file.write(bytes(extra))
    with pytest.raises(TrailingBytesError, match=SHARD):
        open_checkpoint(damaged)


@pytest.mark.parametrize(("entries", "payload"), [
    pytest.param({"a": ONE, "b": {**ONE, "data_offsets": [2, 6]}}, 6, id="overlap"),
    pytest.param({"a": ONE, "b": ONE}, 4, id="same place"),
    pytest.param({"a": ONE, "b": {**ONE, "data_offsets": [8, 12]}}, 12, id="gap"),
    pytest.param({"a": {**ONE, "data_offsets": [4, 8]}}, 8, id="gap at the start"),
    pytest.param({"a": {**ONE, "data_offsets": [0, 6]}}, 6, id="too long"),
    pytest.param({"a": {**ONE, "shape": [3]}}, 4, id="too short"),
    pytest.param({"a": {**ONE, "shape": [2**40, 2**40]}}, 4, id="overflow"),
    pytest.param({"a": {**ONE, "shape": [2**62, 4], "data_offsets": [0, 0]}}, 0, id="overflow to zero"),
])  # fmt: skip
def test_offsets_that_do_not_tile_the_data(tmp_path: Path, entries: Header, payload: int) -> None:
    """Two tensors in the same bytes, bytes of no tensor, and sizes whose product would wrap around in 64 bits."""
    path = write_file(tmp_path / "x.safetensors", entries, payload)
    with pytest.raises(TensorOffsetsError, match=r"x\.safetensors"):
        read_file(path)


@pytest.mark.parametrize("value", [
    None, [], "BF16", {}, {"dtype": "BF16", "shape": [2]}, {**ONE, "more": 1}, {**ONE, "dtype": 3},
    {**ONE, "shape": 2}, {**ONE, "shape": [-2]}, {**ONE, "shape": [2.0]}, {**ONE, "shape": [True, 2]},
    {**ONE, "shape": [2**63]}, {**ONE, "shape": [1] * 9}, {**ONE, "data_offsets": [0]},
    {**ONE, "data_offsets": [4, 0]}, {**ONE, "data_offsets": [0, 4, 8]}, {**ONE, "data_offsets": [-4, 0]},
    {**ONE, "data_offsets": ["0", "4"]},
], ids=str)  # fmt: skip
def test_entries_of_another_form(tmp_path: Path, value: object) -> None:
    """Fields missing, added, of the wrong type or sign."""
    with pytest.raises(HeaderSchemaError, match=r"a in x\.safetensors"):
        read_file(write_file(tmp_path / "x.safetensors", {"a": value}, 4))


values = st.recursive(
    st.sampled_from([0, 1, 2, 4, -1, 2.0, True, None, "BF16", "F32", "F16", 2**63, 2**63 - 1]),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
entry_values = st.one_of(
    st.just(ONE),
    st.fixed_dictionaries(
        {
            "dtype": st.one_of(st.sampled_from(["BF16", "F32", "F16"]), values),
            "shape": st.one_of(st.lists(st.integers(0, 3), max_size=9), values),
            "data_offsets": st.one_of(st.lists(st.integers(0, 8), min_size=2, max_size=2), values),
        },
        optional={"more": values},
    ),
    values,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.text("abc", max_size=2), entry_values, max_size=4))
def test_entries_together_are_entries_one_by_one(document: Header) -> None:
    """The quick look at all of them accepts what the look at each accepts, and no more: the same entries or error."""

    def result(read: Callable[[], list[TensorEntry]]) -> object:
        try:
            return [(entry, list(map(type, entry.shape))) for entry in read()]
        except CheckpointError as error:
            return type(error), error.args

    together = result(lambda: header_entries(document, "f", 100))
    assert together == result(lambda: [single_entry(n, v, "f", 100) for n, v in document.items()])


@pytest.mark.parametrize("metadata", [1, ["format"], {"format": 1}, {"format": {"a": "b"}}], ids=str)
def test_metadata_of_another_form(tmp_path: Path, metadata: object) -> None:
    """The format allows strings only."""
    with pytest.raises(HeaderSchemaError, match="__metadata__"):
        read_file(write_file(tmp_path / "x.safetensors", {"__metadata__": metadata, "a": ONE}, 4))


def test_a_header_behind_white_space(tmp_path: Path) -> None:
    """The format wants `{` first; padding goes behind."""
    with pytest.raises(MalformedJsonError, match=r"x\.safetensors"):
        read_file(write_file(tmp_path / "x.safetensors", b" " + json.dumps({"a": ONE}).encode(), 4))
    assert list(read_file(write_file(tmp_path / "y.safetensors", json.dumps({"a": ONE}).encode() + b"  ", 4))) == ["a"]


edits = st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=edits, cut=st.integers(0, 40))
def test_a_damaged_header_is_read_or_refused(
    tmp_path: Path, tiny_checkpoint: Path, edits: list[tuple[int, int]], cut: int
) -> None:
    """Random bytes changed in a real header: an error of ours, or a header whose tensors tile the file."""
    data = bytearray((tiny_checkpoint / SHARD).read_bytes())
    for at, value in edits:
        data[at] = value
    path = tmp_path / "x.safetensors"
    path.write_bytes(data[: len(data) - cut])
    with suppress(CheckpointError):
        spans = sorted((entry.begin, entry.end) for entry in read_file(path).values())
        assert spans[-1][1] == len(data) - cut
        assert all(left[1] == right[0] for left, right in pairwise(spans))


def test_a_dtype_outside_the_release_is_left_to_the_config(tmp_path: Path) -> None:
    """A header may name any dtype; whether a tensor may have it is decided by name (see the tensor attacks)."""
    entries = read_file(write_file(tmp_path / "x.safetensors", {"a": {**ONE, "dtype": "F16"}}, 4))
    assert entries["a"].dtype == "F16"


@pytest.mark.parametrize("value", [["x" * 10**6] * 3, {"a": list(range(10**5))}], ids=["list", "object"])
def test_an_entry_of_megabytes_is_not_repeated_in_the_error(tmp_path: Path, value: object) -> None:
    """A message is for people and logs: it shows what was found, not all of it."""
    for document in ({"a": value}, {"a": ONE, "__metadata__": {"b": value}}, {"a": {**ONE, "shape": value}}):
        with pytest.raises(HeaderSchemaError) as caught:
            read_file(write_file(tmp_path / "x.safetensors", document, 4))
        assert len(str(caught.value)) < 1000
