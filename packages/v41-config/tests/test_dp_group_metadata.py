"""A DP group's part of a step: what lowering that group alone gives, on the slabs of its own ranks."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from v41_config import (
    TINY,
    DpGroupMetadata,
    ForwardMetadata,
    LayoutError,
    MetadataError,
    ParallelLayout,
    SlabError,
    TokenMapping,
    build_forward_metadata,
)

Array = npt.NDArray[Any]
Metadata = ForwardMetadata[Array]
NODE = ParallelLayout(tp=4, dp=2)
PAGES = 4


def step_of(stored: list[int], lens: list[int], groups: list[int], disabled: frozenset[int] = frozenset()) -> Metadata:
    """Lower requests whose groups number their blocks alike: the n-th request of each group has the same ones."""
    requests = np.arange(len(stored))
    place = requests - np.repeat(groups[:-1], np.diff(groups))
    table = place[:, None] * PAGES + np.arange(PAGES)
    state = np.where(np.isin(requests, list(disabled)), -1, place)[:, None]
    return build_forward_metadata(
        TINY, np.cumsum([0, *lens]), np.array(stored, dtype=np.int64), table, {1: table, 2: table},
        {2: place[:, None], 4: state}, dp_group_start_loc=groups,
    )  # fmt: skip


def arrays(metadata: Metadata) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for field in dataclasses.fields(metadata):
        value = getattr(metadata, field.name)
        found.update(
            {f"{field.name}[{k}]": v for k, v in value.items()} if isinstance(value, dict) else {field.name: value}
        )
    return found


def differing_fields(a: Metadata, b: Metadata) -> list[str]:
    left, right = arrays(a), arrays(b)
    return sorted(left.keys() ^ right.keys()) + [
        name
        for name in left.keys() & right.keys()
        if left[name].dtype != right[name].dtype or not np.array_equal(left[name], right[name])
    ]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_group_runs_what_lowering_it_alone_gives(data: st.DataObject) -> None:
    lens = data.draw(st.lists(st.one_of(st.just(0), st.integers(1, 40)), max_size=6))
    stored = [data.draw(st.integers(0, 300)) for _ in lens]
    dp = data.draw(st.integers(1, 4))
    groups = sorted([0, len(lens), *(data.draw(st.integers(0, len(lens))) for _ in range(dp - 1))])
    disabled = frozenset(data.draw(st.sets(st.integers(0, 5))))
    whole, layout = step_of(stored, lens, groups, disabled), ParallelLayout(2, dp)
    for group, (start, stop) in enumerate(itertools.pairwise(groups)):
        part = whole.for_dp_group(layout, group)
        absent = frozenset(request - start for request in disabled)
        alone = step_of(stored[start:stop], lens[start:stop], [0, stop - start], absent)
        assert differing_fields(part.metadata, alone) == []
        tokens = sum(lens[start:stop])
        assert part.mapping == TokenMapping(layout, group, capacity=tokens, active=tokens)


def test_the_comparison_finds_a_group_counted_from_the_wrong_start() -> None:
    whole = step_of([5, 7, 9, 20], [2, 3, 1, 4], [0, 2, 4])
    first, second = (whole.for_dp_group(ParallelLayout(1, 2), group).metadata for group in (0, 1))
    assert differing_fields(first, second) != []
    for name in ("query_start_loc", "token_to_req_indices", "logit_row_indices", "dp_group_start_loc"):
        moved = dataclasses.replace(second, **{name: getattr(second, name) + np.int32(1)})
        assert differing_fields(second, moved) == [name]
    longer = dataclasses.replace(second, compressor_position_ids=whole.compressor_position_ids)
    assert set(differing_fields(second, longer)) == {f"compressor_position_ids[{s}]" for s in (2, 4, 6)}


def test_two_groups_of_eight_tokens_by_hand() -> None:
    """Requests of 3, 2 and 3 tokens in each group, packed A0 A1 A2 B0 B1 C0 C1 C2, two rows on each of four ranks."""
    whole = step_of([0] * 6, [3, 2, 3] * 2, list(NODE.dp_group_start_loc(6)))
    for group in range(2):
        part = whole.for_dp_group(NODE, group)
        assert part.metadata.query_start_loc.tolist() == [0, 3, 5, 8]
        assert part.metadata.token_to_req_indices.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
        assert part.metadata.logit_row_indices.tolist() == [2, 4, 7]
        assert part.position_ids.tensor.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
        ranks = range(4 * group, 4 * group + 4)
        assert part.mapping.ranks == ranks
        slabs = [part.local_position_ids(rank).tensor.tolist() for rank in ranks]
        assert slabs == [[0, 1], [2, 0], [1, 0], [1, 2]]


def test_padding_is_minus_one_and_its_mask_false() -> None:
    """Five tokens and none in the other group; 8 rows reserved."""
    whole = step_of([10, 0, 3], [4, 1, 0], [0, 2, 3])
    busy, idle = whole.for_dp_group(NODE, 0, capacity=8), whole.for_dp_group(NODE, 1)
    assert [busy.local_position_ids(rank).tensor.tolist() for rank in range(4)] == [
        [10, 11],
        [12, 13],
        [0, -1],
        [-1, -1],
    ]
    assert [busy.local_mask(rank).tensor.tolist() for rank in range(4)] == [
        [True] * 2,
        [True] * 2,
        [True, False],
        [False] * 2,
    ]
    ids = np.arange(100, 105, dtype=np.int32)
    assert busy.local_token_ids(ids, 2).tensor.tolist() == [104, -1]
    assert busy.position_ids.tensor.tolist() == [10, 11, 12, 13, 0, -1, -1, -1]
    assert busy.token_to_req_indices.tensor.tolist() == [0, 0, 0, 0, 1, -1, -1, -1]
    assert idle.mapping.active == idle.mapping.slab_rows == 0
    assert idle.metadata.kv_seq_lens.tolist() == [3]
    assert [idle.local_mask(rank).tensor.tolist() for rank in range(4, 8)] == [[]] * 4


def test_local_positions_with_gathered_hidden_rows_are_refused() -> None:
    """TP1: a slab is as long as the gathered rows."""
    part = step_of([0], [3], [0, 1]).for_dp_group(ParallelLayout(), 0)
    hidden = part.mapping.gathered(np.zeros((3, 8)))
    hidden.require_same_side(part.position_ids)
    with pytest.raises(SlabError):
        hidden.require_same_side(part.local_position_ids(0))
    with pytest.raises(SlabError):
        part.mapping.shard(np.zeros((3, 8)), 0).require_same_side(part.position_ids)


def test_metadata_of_another_step_is_refused() -> None:
    metadata = step_of([0], [3], [0, 1])
    with pytest.raises(SlabError, match="forward metadata: expected 2 positions"):
        DpGroupMetadata(TokenMapping(ParallelLayout(), 0, 3, 2), metadata)


def test_a_group_reads_the_steps_own_memory_where_it_can() -> None:
    whole = step_of([5, 7], [2, 3], [0, 1, 2])
    part = whole.for_dp_group(ParallelLayout(1, 2), 1).metadata
    assert np.shares_memory(part.window_indices, whole.window_indices)
    assert np.shares_memory(part.compressed_slots[2], whole.compressed_slots[2])
    assert part.compressed_slots[2] is part.compressed_slots[4]
    assert all(array.flags.c_contiguous for array in arrays(part).values())


@pytest.mark.parametrize(
    ("layout", "group", "capacity", "where"),
    [
        (ParallelLayout(4, 1), 0, None, "dp"),
        (ParallelLayout(1, 3), 0, None, "dp"),
        (NODE, 2, None, "dp_rank"),
        (NODE, -1, None, "dp_rank"),
        (NODE, 0, 4, "active"),
    ],
)
def test_groups_that_the_step_has_not(layout: ParallelLayout, group: int, capacity: int | None, where: str) -> None:
    whole = step_of([0, 0], [5, 5], [0, 1, 2])
    with pytest.raises(LayoutError) as caught:
        whole.for_dp_group(layout, group, capacity)
    assert caught.value.where == where


def test_groups_may_use_the_same_blocks_and_requests_of_a_group_not() -> None:
    step_of([0, 0], [5, 5], [0, 1, 2])
    table = np.zeros((2, 1), dtype=np.int32)
    with pytest.raises(MetadataError, match="window_block_table, request 0, logical page 0"):
        build_forward_metadata(TINY, [0, 5, 10], [0, 0], table, {1: table, 2: table}, {2: [[0], [1]], 4: [[0], [1]]})


def test_to_torch_keeps_mapping_and_values() -> None:
    torch = pytest.importorskip("torch")
    whole = step_of([5, 7, 9], [2, 3, 1], [0, 1, 3])
    part = whole.for_dp_group(ParallelLayout(2, 2), 1)
    tensors = part.to_torch()
    assert tensors.mapping == part.mapping
    assert tensors.metadata.window_slots.tolist() == part.metadata.window_slots.tolist()
    assert tensors.metadata.window_slots.data_ptr() == part.metadata.window_slots.ctypes.data
    assert tensors.local_position_ids(2).tensor.dtype == torch.int32
    assert tensors.local_position_ids(3).tensor.tolist() == part.local_position_ids(3).tensor.tolist()
    assert torch.equal(tensors.position_ids.tokens, torch.from_numpy(part.metadata.position_ids))
