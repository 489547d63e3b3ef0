"""Slabs of a TP group: padding, owners, and rows of the wrong side refused, whatever they count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from v41_config import LayoutError, ParallelLayout
from v41_config.errors import SlabError
from v41_config.token_mapping import PADDING_ID, GatheredRows, LocalRows, TokenMapping

Array = npt.NDArray[Any]

NODE = ParallelLayout(tp=4, dp=2)


def test_eight_tokens_on_four_ranks_by_hand() -> None:
    """A0 A1 | A2 B0 | B1 C0 | C1 C2 of DP group 0, and the same rows of group 1 on ranks 4 to 7."""
    tokens = np.array(["A0", "A1", "A2", "B0", "B1", "C0", "C1", "C2"])
    for group in range(2):
        mapping = TokenMapping(NODE, group, capacity=8, active=8)
        assert (mapping.slab_rows, mapping.padded_rows) == (2, 8)
        assert mapping.ranks == range(4 * group, 4 * group + 4)
        slabs = [mapping.shard(tokens, rank, fill=PADDING_ID).tensor.tolist() for rank in mapping.ranks]
        assert slabs == [["A0", "A1"], ["A2", "B0"], ["B1", "C0"], ["C1", "C2"]]
        assert mapping.owner_ranks().tolist() == [4 * group + i for i in (0, 0, 1, 1, 2, 2, 3, 3)]


def test_five_tokens_leave_a_rank_with_padding_alone() -> None:
    mapping = TokenMapping(NODE, 1, capacity=5, active=5)
    ids = np.arange(10, 15, dtype=np.int32)
    slabs = [mapping.shard(ids, rank, fill=PADDING_ID) for rank in range(4, 8)]
    assert [slab.tensor.tolist() for slab in slabs] == [[10, 11], [12, 13], [14, -1], [-1, -1]]
    assert [mapping.mask(rank).tensor.tolist() for rank in range(4, 8)] == [
        [True, True],
        [True, True],
        [True, False],
        [False, False],
    ]
    assert [mapping.active_rows(rank) for rank in range(4, 8)] == [2, 2, 1, 0]
    assert [list(mapping.token_range(rank)) for rank in range(4, 8)] == [[0, 1], [2, 3], [4], []]
    assert mapping.gathered(ids, fill=PADDING_ID).tensor.tolist() == [10, 11, 12, 13, 14, -1, -1, -1]
    assert mapping.owner_ranks().tolist() == [4, 4, 5, 5, 6]
    assert slabs[0].tensor.dtype == mapping.owner_ranks().dtype == np.int32


def test_reserved_capacity_decides_the_slabs_and_not_the_active_count() -> None:
    """32 rows reserved, 10 in use: 8 rows a rank, of which the third and fourth rank have none."""
    mapping = TokenMapping(NODE, 0, capacity=32, active=10)
    assert [mapping.active_rows(rank) for rank in range(4)] == [8, 2, 0, 0]
    assert mapping.owner_ranks().tolist() == [0] * 8 + [1] * 2
    compact = TokenMapping(NODE, 0, capacity=10, active=10)
    assert [compact.active_rows(rank) for rank in range(4)] == [3, 3, 3, 1]


counts = st.integers(0, 33)


@given(tp=st.sampled_from([1, 2, 4, 8]), active=counts, reserve=st.integers(0, 9), group=st.integers(0, 1))
def test_every_token_has_one_place_and_comes_back(tp: int, active: int, reserve: int, group: int) -> None:
    mapping = TokenMapping(ParallelLayout(tp, 2), group, active + reserve, active)
    rows = np.random.default_rng(active).integers(1, 99, (active, 3))
    slabs = [mapping.shard(rows, rank) for rank in mapping.ranks]
    np.testing.assert_array_equal(mapping.merge(slabs), rows)
    width = -(-(active + reserve) // tp)
    gathered = mapping.gathered(rows)
    np.testing.assert_array_equal(np.concatenate([slab.tensor for slab in slabs]), gathered.tensor)
    np.testing.assert_array_equal(gathered.tokens, rows)
    held: list[int] = []
    for tp_rank, (rank, slab) in enumerate(zip(mapping.ranks, slabs, strict=True)):
        expected = max(0, min(width, active - tp_rank * width))
        assert mapping.active_rows(rank) == expected == len(slab.tokens)
        assert slab.tensor.shape == (width, 3)
        assert not slab.tensor[expected:].any()
        assert mapping.mask(rank).tensor.tolist() == [True] * expected + [False] * (width - expected)
        np.testing.assert_array_equal(gathered.slab(rank).tensor, slab.tensor)
        held += [rank] * len(mapping.token_range(rank))
        np.testing.assert_array_equal(rows[mapping.token_range(rank)], slab.tokens)
    assert mapping.owner_ranks().tolist() == held


def test_what_is_made_is_a_copy_and_what_is_read_a_view() -> None:
    mapping = TokenMapping(ParallelLayout(2, 1), 0, 4, 4)
    rows = np.arange(4)
    slab, gathered = mapping.shard(rows, 0), mapping.gathered(rows)
    rows[:] = 9
    assert slab.tensor.tolist() == [0, 1]
    assert gathered.tensor.tolist() == [0, 1, 2, 3]
    assert np.shares_memory(slab.tokens, slab.tensor)
    assert np.shares_memory(gathered.slab(1).tensor, gathered.tensor)


def test_map_tokens_sees_tokens_only_and_pads_again() -> None:
    mapping = TokenMapping(ParallelLayout(2, 1), 0, 3, 3)
    slab, other = mapping.shard(np.arange(1, 4), 1), mapping.shard(np.arange(10, 40, 10), 1)
    assert slab.map_tokens(lambda a, b: a + b, other).tensor.tolist() == [33, 0]
    with pytest.raises(SlabError):
        slab.map_tokens(lambda a, b: a + b, mapping.shard(np.arange(3), 0))


def _local(mapping: TokenMapping, rank: int = 0) -> LocalRows[Array]:
    return LocalRows(mapping, rank, np.zeros(mapping.slab_rows))


def _gathered(mapping: TokenMapping) -> GatheredRows[Array]:
    return GatheredRows(mapping, np.zeros(mapping.padded_rows))


@pytest.mark.parametrize("active", [0, 4])
def test_the_side_is_a_type_even_where_the_counts_agree(active: int) -> None:
    """One rank: its slab is the whole group. Local positions with gathered hidden rows are refused all the same."""
    mapping = TokenMapping(ParallelLayout(1, 2), 0, active, active)
    local, gathered = _local(mapping), _gathered(mapping)
    assert len(local.tensor) == len(gathered.tensor)
    local.require_same_side(_local(mapping))
    gathered.require_same_side(_gathered(mapping))
    with pytest.raises(SlabError, match=r"gathered rows: .* found rank 0's slab"):
        gathered.require_same_side(local)
    with pytest.raises(SlabError, match=r"rank 0's slab: .* found gathered TokenMapping"):
        local.require_same_side(gathered)
    with pytest.raises(SlabError, match="found 'ndarray'"):
        gathered.require_same_side(np.zeros(mapping.padded_rows))


OTHERS = [
    TokenMapping(NODE, 1, 8, 8),
    TokenMapping(NODE, 0, 8, 7),
    TokenMapping(NODE, 0, 7, 7),
    TokenMapping(ParallelLayout(4, 1), 0, 8, 8),
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_rows_of_another_group_step_or_layout_are_refused(other: TokenMapping) -> None:
    """All of them have slabs of two rows."""
    mapping = TokenMapping(NODE, 0, 8, 8)
    assert other.slab_rows == mapping.slab_rows
    with pytest.raises(SlabError):
        _gathered(mapping).require_same_side(_gathered(other))
    with pytest.raises(SlabError):
        _local(mapping).require_same_side(_local(other, other.ranks[0]))
    with pytest.raises(SlabError):
        mapping.merge([_local(other, rank) for rank in other.ranks])


def test_slabs_of_two_ranks_do_not_mix() -> None:
    mapping = TokenMapping(NODE, 0, 8, 8)
    with pytest.raises(SlabError):
        _local(mapping, 0).require_same_side(_local(mapping, 1))


MAPPING = TokenMapping(NODE, 1, 7, 5)

MISTAKES: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: TokenMapping(NODE, 2, 8, 8), LayoutError, "dp_rank"),
    (lambda: TokenMapping(NODE, -1, 8, 8), LayoutError, "dp_rank"),
    (lambda: TokenMapping(NODE, 0, 8, 9), LayoutError, "active"),
    (lambda: TokenMapping(NODE, 0, 8, -1), LayoutError, "active"),
    (lambda: MAPPING.active_rows(3), LayoutError, "rank"),
    (lambda: MAPPING.active_rows(8), LayoutError, "rank"),
    (lambda: MAPPING.mask(0), LayoutError, "rank"),
    (lambda: MAPPING.token_range(0), LayoutError, "rank"),
    (lambda: MAPPING.shard(np.zeros(5), 0), LayoutError, "rank"),
    (lambda: LocalRows(MAPPING, 0, np.zeros(2)), LayoutError, "rank"),
    (lambda: _gathered(MAPPING).slab(0), LayoutError, "rank"),
    (lambda: MAPPING.shard(np.zeros(7), 4), SlabError, "packed rows"),
    (lambda: MAPPING.shard(np.zeros(()), 4), SlabError, "packed rows"),
    (lambda: MAPPING.gathered(np.zeros(7)), SlabError, "packed rows"),
    (lambda: MAPPING.pad(np.zeros(2), 6), SlabError, "slab of rank 6"),
    (lambda: LocalRows(MAPPING, 4, np.zeros(8)), SlabError, "slab of rank 4"),
    (lambda: GatheredRows(MAPPING, np.zeros(5)), SlabError, "gathered slabs"),
    (lambda: MAPPING.merge([]), SlabError, "TokenMapping.merge"),
    (lambda: MAPPING.merge([_local(MAPPING, r) for r in (5, 4, 6, 7)]), SlabError, "TokenMapping.merge"),
    (lambda: MAPPING.merge([_local(MAPPING, r) for r in (4, 5, 6)]), SlabError, "TokenMapping.merge"),
]


@pytest.mark.parametrize(("mistake", "kind", "where"), MISTAKES)
def test_each_mistake_is_named(mistake: Callable[[], object], kind: type[Exception], where: str) -> None:
    with pytest.raises(kind) as caught:
        mistake()
    assert getattr(caught.value, "where") == where  # noqa: B009 - pytest's ExceptionInfo knows the base class only


def test_tensors_stay_tensors_of_their_device_and_dtype() -> None:
    torch = pytest.importorskip("torch")
    rows = torch.arange(1, 11, dtype=torch.bfloat16).reshape(5, 2)
    slabs = [MAPPING.shard(rows, rank) for rank in MAPPING.ranks]
    assert [slab.tensor.dtype for slab in slabs] == [torch.bfloat16] * 4
    assert slabs[2].tensor.tolist() == [[9, 10], [0, 0]]
    assert torch.equal(MAPPING.merge(slabs), rows)
    assert MAPPING.gathered(torch.arange(5), fill=PADDING_ID).tensor.tolist() == [0, 1, 2, 3, 4, -1, -1, -1]
    assert MAPPING.gathered(torch.zeros(5, device="meta")).tensor.device.type == "meta"
