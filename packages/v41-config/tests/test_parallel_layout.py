"""How ranks share the model: whole, disjoint and in order, or a typed error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from v41_config import FLASH, TINY, LayoutError, ModelConfig, ParallelLayout

LAYOUTS = [
    ParallelLayout(tp, dp) for tp, dp in ((1, 1), (2, 1), (4, 1), (8, 1), (1, 8), (2, 4), (4, 2), (2, 2), (1, 2))
]


def test_released_deployment_by_hand() -> None:
    """One node of eight cards: TP4, two DP groups, EP8."""
    layout = ParallelLayout(4, 2)
    assert (layout.ep, layout.world_size) == (8, 8)
    assert [layout.tp_rank(r) for r in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [layout.dp_rank(r) for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [layout.ep_rank(r) for r in range(8)] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [list(layout.tp_group(r)) for r in (0, 3, 4, 6)] == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2
    assert layout.head_range(FLASH, 6) == range(32, 48)
    assert layout.output_group_range(FLASH, 6) == range(4, 6)
    assert layout.vocab_range(FLASH, 6) == range(64640, 96960)
    assert layout.expert_range(FLASH, 6) == range(288, 336)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_shares_are_disjoint_complete_and_in_rank_order(layout: ParallelLayout) -> None:
    shares: list[tuple[Callable[[ModelConfig, int], range], int]] = [
        (layout.head_range, 64),
        (layout.output_group_range, 8),
        (layout.vocab_range, 129280),
    ]
    for share, size in shares:
        for dp_rank in range(layout.dp):
            group = layout.tp_group(dp_rank * layout.tp)
            assert [i for rank in group for i in share(FLASH, rank)] == list(range(size))
    world = range(layout.world_size)
    assert [e for rank in world for e in layout.expert_range(FLASH, rank)] == list(range(384))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_output_groups_read_exactly_the_heads_of_their_rank(layout: ParallelLayout) -> None:
    for rank in range(layout.world_size):
        heads = [8 * group + i for group in layout.output_group_range(FLASH, rank) for i in range(8)]
        assert heads == list(layout.head_range(FLASH, rank))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_expert_owners_are_the_ranks_that_hold_them(layout: ParallelLayout) -> None:
    owners = [layout.expert_owner(FLASH, expert) for expert in range(384)]
    assert owners == [rank for rank in range(layout.ep) for _ in layout.expert_range(FLASH, rank)]


NOT_DIVIDING = [
    (FLASH, ParallelLayout(3, 1), "tp", 3, "a divisor of num_attention_heads = 64"),
    (FLASH, ParallelLayout(16, 1), "tp", 16, "a divisor of o_groups = 8"),
    (TINY, ParallelLayout(8, 1), "tp", 8, "a divisor of o_groups = 4"),
    (TINY.model_copy(update={"vocab_size": 510}), ParallelLayout(4, 1), "tp", 4, "a divisor of vocab_size = 510"),
    (FLASH, ParallelLayout(1, 5), "ep = tp * dp", 5, "a divisor of n_routed_experts = 384"),
    (FLASH, ParallelLayout(4, 64), "ep = tp * dp", 256, "a divisor of n_routed_experts = 384"),
    (
        TINY.model_copy(update={"n_routed_experts": 6}),
        ParallelLayout(4, 1),
        "ep = tp * dp",
        4,
        "a divisor of n_routed_experts = 6",
    ),
]


@pytest.mark.parametrize(("config", "layout", "where", "found", "rule"), NOT_DIVIDING)
def test_sizes_that_do_not_divide(
    config: ModelConfig, layout: ParallelLayout, where: str, found: int, rule: str
) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: layout.check(config),
        lambda: layout.head_range(config, 0),
        lambda: layout.output_group_range(config, 0),
        lambda: layout.vocab_range(config, 0),
        lambda: layout.expert_range(config, 0),
        lambda: layout.expert_owner(config, 0),
    ]
    for call in calls:
        with pytest.raises(LayoutError) as caught:
            call()
        assert (caught.value.where, caught.value.found, caught.value.expected) == (where, found, rule)


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "4", None])
def test_sizes_that_are_none(size: Any) -> None:
    with pytest.raises(LayoutError, match="tp: expected a size of at least 1"):
        ParallelLayout(size, 1)
    with pytest.raises(LayoutError, match="dp: expected a size of at least 1"):
        ParallelLayout(1, size)


@pytest.mark.parametrize("rank", [-1, 8, 100])
def test_ranks_outside_the_world(rank: int) -> None:
    layout = ParallelLayout(4, 2)
    calls: list[Callable[[], Any]] = [
        lambda: layout.tp_rank(rank),
        lambda: layout.dp_rank(rank),
        lambda: layout.ep_rank(rank),
        lambda: layout.tp_group(rank),
        lambda: layout.head_range(FLASH, rank),
        lambda: layout.expert_range(FLASH, rank),
        lambda: layout.slab_range(8, rank),
        lambda: layout.active_rows(8, 8, rank),
    ]
    for call in calls:
        with pytest.raises(LayoutError, match="rank: expected 0 <= rank < world_size = 8"):
            call()


@pytest.mark.parametrize("expert", [-1, 384])
def test_experts_that_do_not_exist(expert: int) -> None:
    with pytest.raises(LayoutError, match="expert_id"):
        ParallelLayout(4, 2).expert_owner(FLASH, expert)


# Slabs of TP4 by hand: (capacity, active, rows of a slab, first rows, active rows).
SLABS = [
    (8, 8, 2, [0, 2, 4, 6], [2, 2, 2, 2]),
    (33, 31, 9, [0, 9, 18, 27], [9, 9, 9, 4]),  # not divisible
    (32, 24, 8, [0, 8, 16, 24], [8, 8, 8, 0]),  # the slab comes from the capacity, not from the active rows
    (3, 3, 1, [0, 1, 2, 3], [1, 1, 1, 0]),  # T < TP
    (5, 5, 2, [0, 2, 4, 6], [2, 2, 1, 0]),  # the last slab lies wholly past the capacity
    (5, 0, 2, [0, 2, 4, 6], [0, 0, 0, 0]),
    (0, 0, 0, [0, 0, 0, 0], [0, 0, 0, 0]),  # an idle group
]


@pytest.mark.parametrize(("capacity", "active", "rows", "starts", "actives"), SLABS)
def test_slabs_by_hand(capacity: int, active: int, rows: int, starts: list[int], actives: list[int]) -> None:
    layout = ParallelLayout(4, 2)
    assert layout.slab_rows(capacity) == rows
    for rank in range(8):
        start = starts[rank % 4]
        assert layout.slab_range(capacity, rank) == range(start, start + rows)
        assert layout.active_rows(capacity, active, rank) == actives[rank % 4]


@given(tp=st.integers(1, 16), capacity=st.integers(0, 5000), data=st.data())
def test_slabs_cover_every_row_once(tp: int, capacity: int, data: st.DataObject) -> None:
    layout = ParallelLayout(tp, 1)
    active = data.draw(st.integers(0, capacity))
    slabs = [layout.slab_range(capacity, rank) for rank in range(tp)]
    rows = [row for slab in slabs for row in slab]
    assert rows == list(range(len(rows)))
    assert capacity <= len(rows) < capacity + tp
    for rank, slab in enumerate(slabs):
        assert layout.active_rows(capacity, active, rank) == sum(row < active for row in slab)


def test_slabs_of_impossible_counts() -> None:
    layout = ParallelLayout(4, 2)
    with pytest.raises(LayoutError, match="capacity: expected at least 0 rows, found -1"):
        layout.slab_rows(-1)
    with pytest.raises(LayoutError, match="active: expected 0 <= active <= capacity = 8, found 9"):
        layout.active_rows(8, 9, 0)
    with pytest.raises(LayoutError, match="active"):
        layout.active_rows(8, -1, 0)


def test_requests_go_to_dp_groups_as_runs_of_neighbours() -> None:
    layout = ParallelLayout(tp=2, dp=3)
    assert [layout.request_range(7, group) for group in range(3)] == [range(3), range(3, 5), range(5, 7)]
    assert [layout.request_range(2, group) for group in range(3)] == [range(1), range(1, 2), range(2, 2)]
    assert [len(layout.request_range(0, group)) for group in range(3)] == [0, 0, 0]


@given(st.integers(0, 100), st.integers(1, 9))
def test_every_request_has_one_group_and_groups_are_even(requests: int, dp: int) -> None:
    parts = [ParallelLayout(1, dp).request_range(requests, group) for group in range(dp)]
    assert [r for part in parts for r in part] == list(range(requests))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(("requests", "group", "where"), [(-1, 0, "requests"), (3, 2, "dp_rank"), (3, -1, "dp_rank")])
def test_request_ranges_that_cannot_be(requests: int, group: int, where: str) -> None:
    with pytest.raises(LayoutError) as caught:
        ParallelLayout(1, 2).request_range(requests, group)
    assert caught.value.where == where


@pytest.mark.parametrize("sizes", [(10**9, 1), (1, 10**12), (65, 64)])
def test_worlds_beyond_any_model(sizes: tuple[int, int]) -> None:
    with pytest.raises(LayoutError, match=r"tp \* dp: expected at most 4096 ranks"):
        ParallelLayout(*sizes)
    assert ParallelLayout(64, 64).world_size == 4096
