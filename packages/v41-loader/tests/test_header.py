"""Header encoding against the safetensors library, decoding against files that the library wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from v41_loader.header import encode_header, read_header
from v41_loader.source_files import open_source
from v41_loader.torch_dtypes import TORCH_DTYPES

names = st.text("abcdefghijklmnopqrstuvwxyz_.0123456789é∑", min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"  # the format's own key
)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
contents = st.dictionaries(names, st.tuples(st.sampled_from(sorted(TORCH_DTYPES)), shapes), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("headers")


@settings(max_examples=60, deadline=None)
@given(contents)
def test_encoded_headers_are_the_librarys_bytes(scratch: Path, content: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    path = scratch / "library.safetensors"
    tensors = {name: torch.zeros(shape, dtype=TORCH_DTYPES[dtype]) for name, (dtype, shape) in content.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    written = path.read_bytes()
    header, entries = encode_header((name, dtype, shape) for name, (dtype, shape) in content.items())
    assert written.startswith(header)
    assert max(entry.end for entry in entries.values()) == len(written)
    with open_source(scratch, path.name) as (fd, source):
        assert read_header(fd, source) == entries


def test_offsets_point_at_the_tensors(scratch: Path) -> None:
    path = scratch / "values.safetensors"
    tensors = {"b": torch.arange(6, dtype=torch.int8), "a": torch.full((2, 2), 1.5)}
    save_file(tensors, path)
    with open_source(scratch, path.name) as (fd, source):
        entries = read_header(fd, source)
    data = path.read_bytes()
    assert list(entries) == ["a", "b"]
    assert data[entries["b"].begin : entries["b"].end] == bytes(range(6))
    assert data[entries["a"].begin : entries["a"].end] == torch.full((4,), 1.5).numpy().tobytes()
    assert (entries["a"].dtype, entries["a"].shape, entries["a"].nbytes) == ("F32", (2, 2), 16)
