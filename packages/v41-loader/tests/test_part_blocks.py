"""Blocks of parts: for any cut, exactly the bytes that slicing the whole tensor gives, in buffers of bounded size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from v41_loader.header_entries import TensorEntry
from v41_loader.partition import RankPart
from v41_loader.sharding import part_blocks as module
from v41_loader.sharding.part_blocks import BLOCK_BYTES, BlockBuffers, part_blocks
from v41_loader.source_files import SourceFile, open_source

BEGIN = 24
"""Where the tensor stands in its file."""

Words = npt.NDArray[np.uint16]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Words]:
    """A file of random 16-bit items."""
    directory = tmp_path_factory.mktemp("words")
    values = np.random.default_rng(0).integers(0, 2**16, 400_000, np.uint16)
    (directory / "file").write_bytes(bytes(BEGIN) + values.tobytes())
    return directory, values


def parts_along(axis: int, extent: int, count: int) -> list[RankPart]:
    step = extent // count
    return [RankPart((), axis, number * step, (number + 1) * step) for number in range(count)]


def read_parts(
    directory: Path, shape: tuple[int, int], parts: list[RankPart], rows_per_block: int | None
) -> dict[int, list[bytes]]:
    entry = TensorEntry("tensor", "BF16", shape, BEGIN, BEGIN + 2 * shape[0] * shape[1])
    found: dict[int, list[bytes]] = {number: [] for number in range(len(parts))}
    rows = dict.fromkeys(found, 0)
    with open_source(directory, "file") as (fd, source):
        assert isinstance(source, SourceFile)
        for number, row, block in part_blocks(fd, source, entry, parts, BlockBuffers(), rows_per_block):
            assert row == rows[number]
            assert block.flags.c_contiguous
            rows[number] += len(block)
            found[number].append(block.tobytes())
    return found


@settings(deadline=None)
@given(data=st.data())
def test_blocks_of_parts_are_slices(words: tuple[Path, Words], data: st.DataObject) -> None:
    directory, values = words
    count = data.draw(st.integers(1, 5))
    axis = data.draw(st.sampled_from([0, 1]))
    shape = (data.draw(st.integers(1, 40)) * count, data.draw(st.integers(1, 40)) * count)
    matrix = values[: shape[0] * shape[1]].reshape(shape)
    chosen = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    parts = [parts_along(axis, shape[axis], count)[number] for number in chosen]
    rows_per_block = data.draw(st.none() | st.integers(1, 50))
    found = read_parts(directory, shape, parts, rows_per_block)
    for number, part in enumerate(parts):
        cut = matrix[part.start : part.stop] if axis == 0 else matrix[:, part.start : part.stop]
        assert b"".join(found[number]) == cut.tobytes()
        if rows_per_block is not None:
            sizes = [len(block) // (2 * cut.shape[1]) for block in found[number]]
            assert all(size == rows_per_block for size in sizes[:-1])
            assert sizes[-1] <= rows_per_block


def test_a_whole_tensor_is_one_part(words: tuple[Path, Words]) -> None:
    directory, values = words
    (blocks,) = read_parts(directory, (1000, 400), [RankPart((1000, 400))], None).values()
    assert b"".join(blocks) == values.tobytes()
    assert len(blocks) == -(-1000 // (BLOCK_BYTES // 800))


@pytest.mark.parametrize("axis", [0, 1])
def test_blocks_fit_their_size(words: tuple[Path, Words], monkeypatch: pytest.MonkeyPatch, axis: int) -> None:
    """As many rows as fit; at least one, however long."""
    directory, _ = words
    for limit in (100, 800, 1700, 10_000):
        monkeypatch.setattr(module, "BLOCK_BYTES", limit)
        for blocks in read_parts(directory, (100, 400), parts_along(axis, (100, 400)[axis], 2), None).values():
            assert max(map(len, blocks)) <= max(limit, 800)


def test_buffers_are_reused_up_to_their_size() -> None:
    buffers = BlockBuffers()
    one, two = buffers.block("read", 4, 100), buffers.block("read", 2, 50)
    assert np.shares_memory(one, two)
    assert not np.shares_memory(one, buffers.block("band", 4, 100))
    large = buffers.block("read", 2, BLOCK_BYTES)
    assert large.shape == (2, BLOCK_BYTES)
    assert not np.shares_memory(large, one)
