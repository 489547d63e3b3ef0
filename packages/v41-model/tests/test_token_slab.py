"""The token mapping: nothing is lost or doubled, padding is inert, and the two sides cannot be mixed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from v41_config import LayoutError, ParallelLayout
from v41_model.collective_log import Site
from v41_model.errors import SlabError
from v41_model.local_world import LocalWorld
from v41_model.token_slab import PADDING_ID, GatheredRows, LocalRows, TokenMapping

TP_SIZES = st.sampled_from([1, 2, 4, 8])


@given(tokens=st.integers(0, 33), tp=TP_SIZES, reserve=st.integers(0, 9))
def test_shards_merge_to_the_same_rows(tokens: int, tp: int, reserve: int) -> None:
    mapping = TokenMapping(ParallelLayout(tp, 1), tokens + reserve, tokens)
    rows = torch.arange(1, 3 * tokens + 1).reshape(tokens, 3)
    shards = [mapping.shard(rows, rank) for rank in range(tp)]
    assert torch.equal(mapping.merge(shards), rows)
    assert {len(s.tensor) for s in shards} == {-(-(tokens + reserve) // tp)}
    assert sum(len(s.tokens) for s in shards) == tokens
    for rank, shard in enumerate(shards):
        mask = mapping.mask(rank).tensor
        assert torch.equal(mask, shard.tensor.ne(0).all(1)), "mask and tokens disagree"
        assert not shard.tensor[~mask].any()


@given(tokens=st.integers(0, 33), tp=TP_SIZES)
def test_collective_gather_restores_the_packed_order(tokens: int, tp: int) -> None:
    mapping = TokenMapping(ParallelLayout(tp, 1), tokens, tokens)
    ids = torch.arange(tokens, dtype=torch.int32)

    def program(comm):  # type: ignore[no-untyped-def]
        local = mapping.shard(ids, comm.rank, fill=PADDING_ID)
        return GatheredRows(mapping, comm.all_gather_tokens(local.tensor, Site("ids")))

    for gathered in LocalWorld(tp).run(program):
        assert torch.equal(gathered.tokens, ids)
        assert torch.equal(gathered.tensor[tokens:], torch.full_like(gathered.tensor[tokens:], PADDING_ID))


def test_slabs_follow_the_capacity_not_the_active_count() -> None:
    """A slab that starts past the active rows is all padding, and the others do not move."""
    mapping = TokenMapping(ParallelLayout(4, 2), capacity=32, active=10)
    assert [mapping.active_rows(r) for r in range(8)] == [8, 2, 0, 0] * 2
    ids = torch.arange(10)
    assert mapping.shard(ids, 5, fill=PADDING_ID).tensor.tolist() == [8, 9, -1, -1, -1, -1, -1, -1]
    assert mapping.shard(ids, 6, fill=PADDING_ID).tensor.tolist() == [PADDING_ID] * 8
    compact = TokenMapping(ParallelLayout(4, 2), capacity=10, active=10)
    assert [compact.active_rows(r) for r in range(4)] == [3, 3, 3, 1]


def test_a_token_may_sit_on_another_rank_than_the_rest_of_its_request() -> None:
    """The eight-token example: A0 A1 | A2 B0 | B1 C0 | C1 C2."""
    mapping = TokenMapping(ParallelLayout(4, 2), 8, 8)
    packed = torch.tensor([0, 1, 2, 10, 11, 20, 21, 22])
    assert [mapping.shard(packed, r).tensor.tolist() for r in range(4)] == [[0, 1], [2, 10], [11, 20], [21, 22]]


def test_map_tokens_pads_with_zeros_and_checks_the_mapping() -> None:
    mapping = TokenMapping(ParallelLayout(2, 1), 3, 3)
    x = mapping.shard(torch.tensor([[1.0], [2.0], [3.0]]), 1)
    assert x.map_tokens(lambda a, b: a + b + 1, x).tensor.tolist() == [[7.0], [0.0]]
    with pytest.raises(SlabError, match="one for each token"):
        x.map_tokens(lambda a: a.repeat(2, 1))
    with pytest.raises(SlabError, match="rank 0's slab"):
        x.map_tokens(lambda a, b: a + b, mapping.shard(torch.zeros(3, 1), 0))
    other_step = TokenMapping(ParallelLayout(2, 1), 4, 3)
    with pytest.raises(SlabError, match="capacity=4"):
        x.map_tokens(lambda a, b: a + b, other_step.shard(torch.zeros(3, 1), 1))


def test_local_and_gathered_rows_do_not_mix() -> None:
    """Local positions beside gathered hidden rows have a fitting shape at tp=1 and are still refused."""
    mapping = TokenMapping(ParallelLayout(1, 1), 4, 4)
    hidden = GatheredRows(mapping, torch.zeros(4, 2))
    positions = LocalRows(mapping, 0, torch.zeros(4))
    with pytest.raises(SlabError, match="rank 0's slab"):
        hidden.require_same_side(positions)
    with pytest.raises(SlabError, match="gathered TokenMapping"):
        positions.require_same_side(hidden)
    with pytest.raises(SlabError, match="active=3"):
        hidden.require_same_side(GatheredRows(TokenMapping(ParallelLayout(1, 1), 4, 3), torch.zeros(4)))
    hidden.require_same_side(GatheredRows(mapping, torch.zeros(4)))


def test_wrong_row_counts_are_refused() -> None:
    mapping = TokenMapping(ParallelLayout(4, 1), 7, 7)
    with pytest.raises(SlabError, match="7 rows"):
        mapping.shard(torch.zeros(8), 0)
    with pytest.raises(SlabError, match="2 rows"):
        LocalRows(mapping, 0, torch.zeros(7))
    with pytest.raises(SlabError, match="8 rows"):
        GatheredRows(mapping, torch.zeros(7))
    with pytest.raises(LayoutError):
        TokenMapping(ParallelLayout(4, 1), 7, 8)


def test_merge_needs_each_rank_once_and_in_order() -> None:
    mapping = TokenMapping(ParallelLayout(2, 2), 3, 3)
    shards = [mapping.shard(torch.arange(3), rank) for rank in range(4)]
    assert mapping.merge(shards[2:]).tolist() == [0, 1, 2]
    for wrong in ([shards[1], shards[0]], [shards[0]], [shards[0], shards[3]], [shards[0], shards[0]], []):
        with pytest.raises(SlabError, match="in rank order"):
            mapping.merge(wrong)
