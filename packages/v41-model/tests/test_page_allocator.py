"""Pages are lent once, come back all, and a pool that is full says so before it changes anything."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from v41_config import TINY, build_forward_metadata
from v41_model.errors import PoolError, SessionError
from v41_model.page_allocator import BlockPool, PageAllocator

PLENTY = {"window": 20, "c2a_cmp_kv": 20, "c1a_cmp_kv": 20, "c2a_state": 4}


def _allocator(**blocks: int) -> PageAllocator:
    return PageAllocator(TINY, {**PLENTY, **blocks}, max_requests=4, max_tokens=1024)


def test_pages_follow_the_ratio() -> None:
    allocator = _allocator()
    row = allocator.admit()
    allocator.grow(row, 257)
    assert allocator.free_blocks == {"window": 17, "c2a_cmp_kv": 19, "c1a_cmp_kv": 17, "c2a_state": 3}
    allocator.grow(row, 258)
    assert allocator.free_blocks["c2a_cmp_kv"] == 18, "the 129th ratio-2 row opens a second page"


def test_a_request_keeps_its_pages_when_its_batch_row_changes() -> None:
    allocator = _allocator()
    first, second = allocator.admit(), allocator.admit()
    allocator.grow(first, 130)
    allocator.grow(second, 10)
    straight = allocator.window_block_table([first, second])
    swapped = allocator.window_block_table([second, first])
    assert np.array_equal(straight[::-1], swapped)
    states = allocator.state_block_tables([second, first])
    assert sorted(states) == [2, 4]
    assert states[2].tolist() != allocator.state_block_tables([first, second])[2].tolist()


def test_window_pages_come_back_behind_the_window() -> None:
    allocator = _allocator()
    row = allocator.admit()
    allocator.grow(row, 300)
    window = TINY.sliding_window
    allocator.free_behind_window(row, 128 + window - 2)
    assert (allocator.window_block_table([row])[0, :3] >= 0).all(), "position 127 is still read by the next token"
    allocator.free_behind_window(row, 128 + window - 1)
    assert allocator.window_block_table([row])[0, 0] == -1
    metadata = build_forward_metadata(TINY, [0, 1], [300], *_tables(allocator, row, 301))
    assert metadata.window_lens.tolist() == [window]
    allocator.grow(row, 400)
    assert allocator.window_block_table([row])[0, 0] == -1, "a freed page is not lent again to the same request"
    allocator.drop(row)
    assert allocator.free_blocks == PLENTY


def _tables(allocator: PageAllocator, row: int, tokens: int):  # type: ignore[no-untyped-def]
    allocator.grow(row, tokens)
    return (
        allocator.window_block_table([row]),
        allocator.compressed_block_tables([row]),
        allocator.state_block_tables([row]),
    )


def test_a_full_pool_is_an_error_that_changes_nothing() -> None:
    allocator = _allocator(c1a_cmp_kv=2)
    row = allocator.admit()
    allocator.grow(row, 200)
    before = allocator.free_blocks
    with pytest.raises(PoolError, match=r"pool c1a_cmp_kv: expected 1 free blocks.*found 0 of 2 blocks free"):
        allocator.grow(row, 300)
    assert allocator.free_blocks == before
    for _ in range(3):
        allocator.admit()
    with pytest.raises(PoolError, match="pool requests"):
        allocator.admit()
    with pytest.raises(PoolError, match="at most 1024 tokens"):
        allocator.grow(row, 1025)


@pytest.mark.parametrize("row", [1, -1, 4])
def test_only_admitted_rows_grow(row: int) -> None:
    allocator = _allocator()
    allocator.admit()
    with pytest.raises(PoolError, match=f"admitted and not dropped, found request row {row}"):
        allocator.grow(row, 10)
    assert allocator.free_blocks == {**PLENTY, "c2a_state": 3}


def test_no_state_block_no_admission() -> None:
    allocator = _allocator(c2a_state=1)
    row = allocator.admit()
    with pytest.raises(PoolError, match="pool c2a_state"):
        allocator.admit()
    allocator.drop(row)
    assert allocator.admit() == row


def test_blocks_that_are_not_lent_are_refused() -> None:
    pool = BlockPool("window", 3)
    lent = pool.lend(2)
    for wrong in ([2], [3], [-1], [0, 0]):
        with pytest.raises(PoolError, match="lent, once each"):
            pool.take_back(np.array(wrong, dtype=np.int32))
    pool.take_back(lent)
    assert pool.free_blocks == 3
    with pytest.raises(PoolError):
        pool.take_back(lent)


def test_blocks_of_another_model_are_refused() -> None:
    for blocks, pattern in (({"window": 3}, "a count for each of"), ({**PLENTY, "window": 0}, r"blocks\[window\]")):
        with pytest.raises(SessionError, match=pattern):
            PageAllocator(TINY, blocks, max_requests=4, max_tokens=1024)


def test_a_claim_is_kept_free() -> None:
    allocator = _allocator(window=3, c1a_cmp_kv=4)
    claim = {"window": 1, "c2a_cmp_kv": 1, "c1a_cmp_kv": 2, "c2a_state": 1}
    first, second = allocator.admit(claim), allocator.admit(claim)
    assert (allocator.room(first), allocator.room(second)) == (2 * 128, 2 * 128), "a claim, and a page nobody claims"
    allocator.grow(first, 256)
    assert allocator.room(second) == 128, "the other one took the page that nobody claimed"
    with pytest.raises(PoolError, match="1 of 3 blocks free, 1 of them claimed by other requests"):
        allocator.grow(first, 257)
    allocator.grow(second, 128)
    assert not allocator.can_admit(claim)
    with pytest.raises(PoolError, match="pool window"):
        allocator.admit(claim)
    allocator.drop(first)
    assert allocator.can_admit(claim)


@given(st.lists(st.tuples(st.sampled_from(["admit", "grow", "free", "drop"]), st.integers(0, 3), st.integers(1, 600))))
def test_live_pages_are_never_shared(actions: list[tuple[str, int, int]]) -> None:
    allocator = _allocator(window=8, c1a_cmp_kv=8)
    lengths: dict[int, int] = {}
    for action, which, tokens in actions:
        try:
            if action == "admit":
                lengths[allocator.admit()] = 0
            elif which in lengths:
                if action == "grow" and tokens > lengths[which]:
                    allocator.grow(which, tokens)
                    lengths[which] = tokens
                elif action == "free":
                    allocator.free_behind_window(which, lengths[which])
                elif action == "drop":
                    allocator.drop(which)
                    del lengths[which]
        except PoolError:
            continue
        rows = sorted(lengths)
        window = allocator.window_block_table(rows)
        for table, blocks in ((window, 8), (allocator.compressed_block_tables(rows)[1], 8)):
            live = table[table >= 0]
            assert len(set(live.tolist())) == len(live)
            assert len(live) + allocator.free_blocks["window" if table is window else "c1a_cmp_kv"] == blocks
    for row in list(lengths):
        allocator.drop(row)
    assert allocator.free_blocks == {**PLENTY, "window": 8, "c1a_cmp_kv": 8}
