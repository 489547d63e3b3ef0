"""LocalWorld: every collective against its definition, and every way it can go wrong is one typed error."""

from __future__ import annotations

import copy

import pytest
import torch
from greenlet import GreenletExit  # type: ignore[import-untyped]
from torch import Tensor

from v41_config import ParallelLayout, SlabError
from v41_model.collective_log import CollectiveKind, CollectiveRecord, Site
from v41_model.communicator import Communicator
from v41_model.errors import RankError, WorldError
from v41_model.local_world import LocalWorld

TP4_DP2 = ParallelLayout(tp=4, dp=2)
HERE = Site("here")


def _partial(rank: int, rows: int = 8, width: int = 3) -> Tensor:
    """FP32 rows whose rank-order sum differs from the reversed one in the last bit."""
    return torch.rand((rows, width), generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank % 4)


def test_all_gather_concatenates_the_tp_group_in_rank_order() -> None:
    def program(comm: Communicator) -> Tensor:
        return comm.all_gather_tokens(torch.full((2, 1), comm.rank, dtype=torch.bfloat16), HERE)

    results = LocalWorld(TP4_DP2).run(program)
    assert results[0][:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert results[5][:, 0].tolist() == [4, 4, 5, 5, 6, 6, 7, 7]
    assert results[0].dtype == torch.bfloat16


def test_reduce_scatter_is_sum_then_slice_in_rank_order() -> None:
    results = LocalWorld(TP4_DP2).run(lambda comm: comm.reduce_scatter_tokens(_partial(comm.rank), HERE))
    for group in (range(4), range(4, 8)):
        total = _partial(group[0])
        for rank in group[1:]:
            total = total + _partial(rank)
        assert torch.equal(torch.cat([results[r] for r in group]), total)
    backwards = ((_partial(3) + _partial(2)) + _partial(1)) + _partial(0)
    assert not torch.equal(torch.cat(results[:4]), backwards), "the data does not show the order of the sum"


def test_all_reduce_equals_gathered_reduce_scatter() -> None:
    def program(comm: Communicator) -> tuple[Tensor, Tensor]:
        partial = _partial(comm.rank)
        scattered = comm.reduce_scatter_tokens(partial, HERE)
        return comm.all_reduce(partial, HERE), comm.all_gather_tokens(scattered, HERE)

    for reduced, gathered in LocalWorld(TP4_DP2).run(program):
        assert torch.equal(reduced, gathered)


def test_sums_take_fp32_only() -> None:
    def program(comm: Communicator) -> Tensor:
        return comm.all_reduce(torch.ones(2, 2, dtype=torch.bfloat16), HERE)

    with pytest.raises(RankError, match="FP32 partials"):
        LocalWorld(2).run(program)


def test_gather_logits_joins_the_vocabulary() -> None:
    results = LocalWorld(ParallelLayout(2, 1)).run(
        lambda comm: comm.gather_logits(torch.tensor([[0.0, 1.0], [4.0, 5.0]]) + 2 * comm.rank, HERE)
    )
    assert results[0].tolist() == results[1].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_rows_travel_with_their_weights_and_ids_in_exact_sizes() -> None:
    """Rank r sends r rows to rank 0 and one row to every other rank; receivers see them by source rank."""

    def program(comm: Communicator) -> tuple[list[int], list[float], list[int]]:
        counts = torch.tensor([comm.rank, 1, 1, 1])
        n = int(counts.sum())
        rows = torch.full((n, 2), float(comm.rank), dtype=torch.bfloat16)
        weights = torch.arange(n, dtype=torch.float32) + 10 * comm.rank
        ids = torch.repeat_interleave(torch.arange(4, dtype=torch.int32), counts)
        incoming = comm.exchange_counts(counts, HERE)
        r, w, i = comm.exchange_rows((rows, weights, ids), counts, incoming, HERE)
        assert (r.dtype, w.dtype, i.dtype) == (torch.bfloat16, torch.float32, torch.int32)
        assert set(i.tolist()) == {comm.rank}
        return incoming.tolist(), w.tolist(), r[:, 0].int().tolist()

    results = LocalWorld(4).run(program)
    assert results[0] == ([0, 1, 2, 3], [10.0, 20.0, 21.0, 30.0, 31.0, 32.0], [1, 2, 2, 3, 3, 3])
    assert results[3] == ([1, 1, 1, 1], [2.0, 13.0, 24.0, 35.0], [0, 1, 2, 3])


def test_an_exchange_without_any_row_keeps_the_width() -> None:
    def program(comm: Communicator) -> Tensor:
        none = torch.zeros(2, dtype=torch.int64)
        (rows,) = comm.exchange_rows((torch.zeros(0, 7),), none, comm.exchange_counts(none, HERE), HERE)
        return rows

    assert [list(rows.shape) for rows in LocalWorld(2).run(program)] == [[0, 7], [0, 7]]


def test_results_share_no_memory() -> None:
    """A member that overwrites what it sent or received changes nothing for the others."""

    def program(comm: Communicator) -> list[Tensor]:
        mine = torch.full((1, 2), float(comm.rank))
        gathered = comm.all_gather_tokens(mine, HERE)
        mine.fill_(-1)
        reduced = comm.all_reduce(gathered, HERE)
        gathered.fill_(-2)
        counts = torch.ones(2, dtype=torch.int64)
        sent = reduced[:2].clone()
        (received,) = comm.exchange_rows((sent,), counts, counts, HERE)
        reduced.fill_(-3)
        sent.fill_(-4)
        return [comm.all_gather_tokens(received, HERE)]

    first, second = LocalWorld(2).run(program)
    assert first[0].tolist() == second[0].tolist() == [[0, 0], [0, 0], [2, 2], [2, 2]]


def test_one_rank_gets_copies_too() -> None:
    def program(comm: Communicator) -> bool:
        rows = torch.zeros(2, 2)
        one = torch.tensor([2])
        outputs = [
            comm.all_gather_tokens(rows, HERE),
            comm.reduce_scatter_tokens(rows, HERE),
            comm.all_reduce(rows, HERE),
            comm.gather_logits(rows, HERE),
            *comm.exchange_rows((rows,), one, one, HERE),
        ]
        rows.fill_(1)
        return all(not o.any() for o in outputs)

    assert LocalWorld(1).run(program) == [True]


def test_bytes_follow_the_stated_rule() -> None:
    """The account of the sequence-parallel boundary: ``D * (2 * T_local + 10 * T)`` bytes at TP4, all-reduce 20 T D."""
    t_local, width = 2, 16

    def program(comm: Communicator) -> list[CollectiveRecord]:
        rows = torch.zeros(t_local, width, dtype=torch.bfloat16)
        comm.all_gather_tokens(rows, Site("gather", 3))
        comm.reduce_scatter_tokens(torch.zeros(4 * t_local, width), Site("scatter", 3))
        comm.all_reduce(torch.zeros(4 * t_local, width), Site("reduce", 3))
        return list(comm.log.records)

    t = 4 * t_local
    for gather, scatter, reduce in LocalWorld(4).run(program):
        assert (gather.kind, gather.site) == (CollectiveKind.TOKEN_ALL_GATHER, Site("gather", 3))
        assert (gather.sent, gather.received) == (((t_local, width),), ((t, width),))
        assert (gather.bytes_sent, gather.bytes_received) == (2 * t_local * width, 2 * t * width)
        assert (scatter.sent, scatter.received) == (((t, width),), ((t_local, width),))
        boundary = gather.bytes_sent + gather.bytes_received + scatter.bytes_sent + scatter.bytes_received
        assert boundary == width * (2 * t_local + 10 * t)
        assert reduce.bytes_sent + reduce.bytes_received == width * 20 * t


def test_log_totals_outlive_the_steps() -> None:
    world = LocalWorld(2)

    def program(comm: Communicator) -> None:
        comm.log.begin_step()
        comm.all_reduce(torch.zeros(1, 1), HERE)

    for _ in range(3):
        world.run(program)
    for comm in world.communicators:
        assert len(comm.log.records) == 1
        total = comm.log.totals[CollectiveKind.ALL_REDUCE, HERE]
        assert (total.calls, total.bytes_sent, total.bytes_received) == (3, 12, 24)


def test_runs_are_in_inference_mode_and_deterministic() -> None:
    order: list[tuple[int, int]] = []

    def program(comm: Communicator) -> bool:
        for turn in range(2):
            order.append((turn, comm.rank))
            comm.all_gather_tokens(torch.zeros(1), HERE)
        return torch.is_inference_mode_enabled()

    world = LocalWorld(3)
    assert all(world.run(program))
    first, order[:] = list(order), []
    world.run(program)
    assert order == first
    assert not torch.is_inference_mode_enabled()


def test_a_raising_rank_surfaces_with_its_rank_and_stops_the_others() -> None:
    unwound: list[int] = []

    def program(comm: Communicator) -> None:
        try:
            comm.all_gather_tokens(torch.zeros(1), HERE)
            if comm.rank == 2:
                raise ValueError("no such expert")
            comm.all_gather_tokens(torch.zeros(1), HERE)
            comm.all_gather_tokens(torch.zeros(1), HERE)
        finally:
            unwound.append(comm.rank)

    world = LocalWorld(4)
    with pytest.raises(RankError, match=r"rank 2.*ValueError: no such expert") as caught:
        world.run(program)
    assert caught.value.rank == 2
    assert isinstance(caught.value.__cause__, ValueError)
    assert sorted(unwound) == [0, 1, 2, 3]
    assert copy.copy(caught.value).rank == 2
    assert world.run(lambda comm: comm.rank) == [0, 1, 2, 3], "the world is usable again"


@pytest.mark.parametrize(
    ("odd_call", "pattern"),
    [
        (lambda c: c.all_reduce(torch.zeros(2, 2), HERE), "rank 0: token_all_gather.*rank 1 in all_reduce"),
        (lambda c: c.all_gather_tokens(torch.zeros(2, 2), Site("elsewhere", 4)), r"elsewhere \(layer 4\)"),
        (lambda c: c.all_gather_tokens(torch.zeros(3, 2), HERE), r"rank 1 .*\[3, 2\]"),
        (lambda c: c.all_gather_tokens(torch.zeros(2, 2, dtype=torch.bfloat16), HERE), "bfloat16"),
    ],
    ids=["kind", "site", "shape", "dtype"],
)
def test_members_in_different_collectives(odd_call, pattern) -> None:  # type: ignore[no-untyped-def]
    def program(comm: Communicator) -> None:
        if comm.rank == 1:
            odd_call(comm)
        else:
            comm.all_gather_tokens(torch.zeros(2, 2), HERE)

    with pytest.raises(WorldError, match=pattern):
        LocalWorld(2).run(program)


def test_a_finished_rank_does_not_hang_the_others() -> None:
    def program(comm: Communicator) -> None:
        if comm.rank != 5:
            comm.exchange_counts(torch.zeros(8, dtype=torch.int64), Site("ffn", 7))

    with pytest.raises(WorldError, match=r"rank 7 waits in counts_exchange .*ffn \(layer 7\).*finished: \[5\]") as e:
        LocalWorld(TP4_DP2).run(program)
    assert "rank 5 waits" not in str(e.value)


def test_ranks_in_different_groups_do_not_hang() -> None:
    """Rank 0 gathers inside its TP group while rank 1 is already in the EP exchange."""

    def program(comm: Communicator) -> None:
        if comm.rank != 1:
            comm.all_gather_tokens(torch.zeros(1), HERE)
        comm.exchange_counts(torch.zeros(4, dtype=torch.int64), HERE)

    with pytest.raises(WorldError, match=r"rank 0 waits in token_all_gather.*rank 1 waits in counts_exchange"):
        LocalWorld(ParallelLayout(2, 2)).run(program)


def test_counts_that_disagree_are_refused_by_the_receiver() -> None:
    def program(comm: Communicator) -> None:
        counts = torch.ones(2, dtype=torch.int64)
        wrong = counts + (comm.rank == 1)
        comm.exchange_rows((torch.zeros(2, 1),), counts, wrong, HERE)

    with pytest.raises(WorldError, match="row_all_to_all at here, rank 1"):
        LocalWorld(2).run(program)


def test_send_counts_must_cover_the_rows() -> None:
    def program(comm: Communicator) -> None:
        counts = torch.ones(2, dtype=torch.int64)
        comm.exchange_rows((torch.zeros(3, 1),), counts, counts, HERE)

    with pytest.raises(RankError, match="columns of"):
        LocalWorld(2).run(program)


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(RankError) as caught:
        LocalWorld(4).run(lambda comm: comm.reduce_scatter_tokens(torch.zeros(6, 1), HERE))
    assert isinstance(caught.value.__cause__, SlabError)


def test_collectives_outside_a_run_and_nested_runs_are_refused() -> None:
    world = LocalWorld(1)
    with pytest.raises(WorldError, match=r"outside of LocalWorld.run"):
        world.communicators[0].all_reduce(torch.zeros(1), HERE)
    with pytest.raises(RankError, match="one run at a time"):
        world.run(lambda comm: world.run(lambda c: None))


def test_worlds_nest_when_they_are_different() -> None:
    inner = LocalWorld(2)
    outer = LocalWorld(2)

    def program(comm: Communicator) -> float:
        first = inner.run(lambda c: c.all_reduce(torch.ones(1), HERE))[0]
        return float(comm.all_reduce(first, HERE))

    assert outer.run(program) == [4.0, 4.0]


@pytest.mark.parametrize("leave", [GreenletExit, SystemExit], ids=lambda error: error.__name__)
def test_a_rank_that_leaves_is_named_like_one_that_raises(leave: type[BaseException]) -> None:
    def program(comm: Communicator) -> None:
        if comm.rank == 1:
            raise leave
        comm.all_gather_tokens(torch.zeros(1), HERE)

    with pytest.raises(RankError, match=f"rank 1.*{leave.__name__}"):
        LocalWorld(2).run(program)


@pytest.mark.parametrize("name", ["all_gather_tokens", "reduce_scatter_tokens", "all_reduce", "gather_logits"])
def test_a_tensor_without_rows_is_refused(name: str) -> None:
    with pytest.raises(RankError, match=r"expected rows, \[R, ...\], found a tensor without dimensions"):
        LocalWorld(2).run(lambda comm: getattr(comm, name)(torch.tensor(1.0), HERE))


@pytest.mark.parametrize(
    ("sends", "receives", "pattern"),
    [
        ([3, -1], [1, 1], r"counts of at least 0 rows, found \[3, -1\]"),
        ([1, 1], [3, -1], r"counts of at least 0 rows, found \[3, -1\]"),
        ([1, 1], [1], r"counts, INT64 \[2\], found \[1\] torch.int64"),
        ([1.0, 1.0], [1, 1], r"counts, INT64 \[2\], found \[2\] torch.float32"),
    ],
)
def test_impossible_counts_are_refused(sends: list[int], receives: list[int], pattern: str) -> None:
    def program(comm: Communicator) -> None:
        comm.exchange_rows((torch.zeros(2, 1),), torch.tensor(sends), torch.tensor(receives), HERE)

    with pytest.raises(RankError, match=pattern):
        LocalWorld(2).run(program)
    if sends == [3, -1]:
        with pytest.raises(RankError, match=pattern):
            LocalWorld(2).run(lambda comm: comm.exchange_counts(torch.tensor(sends), HERE))


def test_an_exchange_without_columns_is_refused() -> None:
    def program(comm: Communicator) -> None:
        none = torch.zeros(2, dtype=torch.int64)
        comm.exchange_rows((), none, none, HERE)

    with pytest.raises(RankError, match=r"found columns of \[\]"):
        LocalWorld(2).run(program)
