"""Entry and exit: token ids to unique slabs, slabs to logits in the packed order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from v41_config import TINY, LocalRows, ParallelLayout, TokenMapping, V41Error
from v41_goldens.linear import fp32_linear
from v41_model.collective_log import CollectiveKind
from v41_model.communicator import Communicator
from v41_model.embedding import embed_tokens
from v41_model.errors import RankError
from v41_model.lm_head import final_norm, lm_head
from v41_model.local_world import LocalWorld
from v41_model.operators import Operators
from v41_model.wiring import Wiring

VOCABULARY, WIDTH = TINY.vocab_size, 8


def _table() -> Tensor:
    table = torch.randn((VOCABULARY, WIDTH), generator=torch.Generator().manual_seed(1)).bfloat16()
    table[:, 0] = -0.0
    table[:, 1] = 0.0
    return table


def _embed(
    ids: Tensor, tp: int, sharded: bool, capacity: int | None = None, wiring: Wiring = Wiring.SHARDED
) -> tuple[LocalWorld, list[LocalRows[Tensor]]]:
    layout = ParallelLayout(tp, 1)
    mapping = TokenMapping(layout, 0, len(ids) if capacity is None else capacity, len(ids))
    table = _table()

    def program(comm: Communicator) -> LocalRows[Tensor]:
        held = layout.vocab_range(TINY, comm.rank)
        part = table[held.start : held.stop] if sharded else table
        return embed_tokens(ids, part, TINY, wiring.boundary(mapping, comm.rank, comm), Operators())

    world = LocalWorld(layout)
    return world, world.run(program)


def _bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(torch.int16).flatten().tolist()


@settings(max_examples=40)
@given(
    ids=st.lists(st.integers(0, VOCABULARY - 1), max_size=11),
    tp=st.sampled_from([1, 2, 4]),
    sharded=st.booleans(),
    reserve=st.integers(0, 5),
)
def test_either_table_gives_unique_slabs_with_the_tables_bits(
    ids: list[int], tp: int, sharded: bool, reserve: int
) -> None:
    """The sign of zero too: a ReduceScatter of zeros must not turn -0 into +0. Padding is +0."""
    tokens = torch.tensor(ids, dtype=torch.int32)
    _, shards = _embed(tokens, tp, sharded, len(ids) + reserve)
    assert _bits(shards[0].mapping.merge(shards)) == _bits(_table()[tokens.long()])
    for shard in shards:
        assert set(_bits(shard.tensor[len(shard.tokens) :])) <= {0}


def test_only_a_sharded_table_communicates() -> None:
    tokens = torch.arange(5, dtype=torch.int32)
    world, _ = _embed(tokens, 4, sharded=False)
    assert [c.log.records for c in world.communicators] == [[]] * 4
    world, _ = _embed(tokens, 4, sharded=True)
    for communicator in world.communicators:
        (record,) = communicator.log.records
        assert record.kind is CollectiveKind.TOKEN_REDUCE_SCATTER
        assert (record.sent, record.received) == (((8, WIDTH),), ((2, WIDTH),))
    world, _ = _embed(torch.zeros(0, dtype=torch.int32), 4, sharded=True)
    assert [c.log.records for c in world.communicators] == [[]] * 4, "an idle group skips together"


def test_a_table_of_another_size_is_refused() -> None:
    mapping = TokenMapping(ParallelLayout(2, 1), 0, 2, 2)

    def program(comm: Communicator) -> LocalRows[Tensor]:
        boundary = Wiring.SHARDED.boundary(mapping, comm.rank, comm)
        return embed_tokens(torch.zeros(2, dtype=torch.int32), _table()[:7], TINY, boundary, Operators())

    with pytest.raises(RankError, match="7 rows") as caught:
        LocalWorld(2).run(program)
    assert isinstance(caught.value.__cause__, V41Error)


@pytest.mark.parametrize("tokens", [1, 3, 8, 9])
@pytest.mark.parametrize("rows", [None, [0], [0, 2]], ids=["all", "first", "some"])
def test_logits_come_back_in_the_packed_order(tokens: int, rows: list[int] | None) -> None:
    layout = ParallelLayout(4, 1)
    mapping = TokenMapping(layout, 0, tokens, tokens)
    rows = None if rows is None else [r for r in rows if r < tokens]
    hidden = torch.randn((tokens, WIDTH), generator=torch.Generator().manual_seed(tokens)).bfloat16()
    table = _table()

    def program(comm: Communicator) -> Tensor:
        held = layout.vocab_range(TINY, comm.rank)
        logit_rows = None if rows is None else torch.tensor(rows)
        normed = mapping.shard(hidden, comm.rank)
        boundary = Wiring.SHARDED.boundary(mapping, comm.rank, comm)
        return lm_head(normed, table[held.start : held.stop], logit_rows, boundary, comm, Operators())

    expected = fp32_linear(hidden, table)
    for logits in LocalWorld(layout).run(program):
        assert torch.equal(logits, expected if rows is None else expected[rows])


def test_final_norm_is_local_and_keeps_padding_zero() -> None:
    mapping = TokenMapping(ParallelLayout(4, 1), 0, 5, 5)
    x_hc, mix = torch.ones(5, TINY.hc_mult, WIDTH).bfloat16(), torch.ones(5, TINY.hc_mult)
    norm = torch.ones(WIDTH).bfloat16()
    collapsed, normed = final_norm(mapping.shard(x_hc, 2), mapping.shard(mix, 2), norm, TINY, Operators())
    assert collapsed.tensor[:, 0].tolist() == [4, 0]
    assert normed.tensor[:, 0].tolist() == [1, 0]


@pytest.mark.parametrize("sharded", [True, False], ids=["vocabulary shards", "whole table"])
def test_replicated_entry_gives_every_row_to_every_rank(sharded: bool) -> None:
    ids = torch.tensor([5, 300, 7, 511, 0], dtype=torch.int32)
    world, rows = _embed(ids, 4, sharded, wiring=Wiring.REPLICATED)
    assert all(_bits(r.tokens) == _bits(_table()[ids.long()]) for r in rows)
    kinds = [record.kind for c in world.communicators for record in c.log.records]
    assert kinds == [CollectiveKind.ALL_REDUCE] * (4 if sharded else 0)
