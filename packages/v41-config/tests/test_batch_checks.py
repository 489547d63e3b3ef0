"""Every way to break a batch once: one `MetadataError` that names table, request and logical page."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from v41_config import FLASH, TINY, MetadataError, build_forward_metadata

Arguments = dict[str, Any]


def arguments() -> Arguments:
    """TINY (window 16, KV sources 2 and 4 of ratio 2, 6 of ratio 1): decode of 2 rows at 300, a chunk of 20 rows at
    120, a request without rows. Window pages 0 and 1 of the first request are behind the window and freed."""
    return {
        "config": TINY,
        "query_start_loc": [0, 2, 22, 22],
        "kv_seq_lens": [300, 120, 40],
        "window_block_table": [[-1, -1, 5], [6, 7, -1], [-1, -1, -1]],
        "compressed_block_tables": {
            1: [[10, 11, 12], [13, 14, -1], [15, -1, -1]],
            2: [[20, 21], [22, -1], [23, -1]],
        },
        "state_block_tables": {2: [[0], [1], [2]], 4: [[4], [-1], [6]]},
    }


def test_the_unbroken_batch_passes() -> None:
    assert build_forward_metadata(**arguments()).position_ids.tolist() == [300, 301, *range(120, 140)]


def put(*path: Any, value: Any) -> Callable[[Arguments], None]:
    """Set the element of the arguments at `path`."""

    def change(broken: Arguments) -> None:
        target: Any = broken
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value

    return change


def drop(*path: Any) -> Callable[[Arguments], None]:
    def change(broken: Arguments) -> None:
        target: Any = broken
        for key in path[:-1]:
            target = target[key]
        del target[path[-1]]

    return change


WINDOW, COMPRESSED, STATE = "window_block_table", "compressed_block_tables", "state_block_tables"
RATIO_1, RATIO_2 = f"{COMPRESSED}[1] of KV source layers 6", f"{COMPRESSED}[2] of KV source layers 2, 4"

BROKEN: list[tuple[Callable[[Arguments], None], str, str]] = [
    # lengths
    (put("query_start_loc", value=[1, 2, 22, 22]), "query_start_loc[0]", "0"),
    (put("query_start_loc", value=[-1, 2, 22, 22]), "query_start_loc[0]", "0"),
    (put("query_start_loc", value=[0, 22, 2, 22]), "query_start_loc, request 1", "nondecreasing"),
    (put("query_start_loc", value=[0, 2, 22, -1]), "query_start_loc, request 2", "nondecreasing"),
    (put("query_start_loc", value=[0, 2**63 - 1, -(2**63), 0]), "query_start_loc, request 1", "nondecreasing"),
    (put("query_start_loc", value=[0, 2, 22]), "query_start_loc", "4, one more than requests"),
    (put("query_start_loc", value=[]), "query_start_loc", "4, one more than requests"),
    (put("query_start_loc", value=[[0, 2, 22, 22]]), "query_start_loc", "INT64 values of 1 dimensions"),
    (put("query_start_loc", value=[0.0, 2.0, 22.0, 22.0]), "query_start_loc", "INT64 values"),
    (put("query_start_loc", value=[0, 2, 2**70, 2**70]), "query_start_loc", "INT64 values"),
    (put("query_start_loc", value=None), "query_start_loc", "INT64 values"),
    (put("kv_seq_lens", 1, value=-1), "kv_seq_lens, request 1", "at least 0"),
    (put("kv_seq_lens", 1, value=4077), "kv_seq_lens, request 1", "at most max_position_embeddings = 4096"),
    (put("kv_seq_lens", 2, value=4097), "kv_seq_lens, request 2", "at most max_position_embeddings = 4096"),
    (put("kv_seq_lens", 0, value=2**63 - 1), "kv_seq_lens, request 0", "at most max_position_embeddings = 4096"),
    (put("kv_seq_lens", value=np.array([300, 120, 2**64 - 1], dtype=np.uint64)), "kv_seq_lens", "INT64 values"),
    (put("kv_seq_lens", value=[True, False, True]), "kv_seq_lens", "INT64 values"),
    (put("kv_seq_lens", value=["300", "120", "40"]), "kv_seq_lens", "INT64 values"),
    # window pages
    (drop(WINDOW, 2), WINDOW, "one row for each of 3 requests"),
    (put(WINDOW, value=[]), WINDOW, "one row for each of 3 requests"),
    (put(WINDOW, value=[-1, 5, 6]), WINDOW, "INT64 values of 2 dimensions"),
    (put(WINDOW, value=[[5], [6, 7], []]), WINDOW, "rectangular"),
    (put(WINDOW, value=np.full((3, 3), 5.0)), WINDOW, "INT64 values of 2 dimensions"),
    (put(WINDOW, value=np.full((3, 3), 2**64 - 1, dtype=np.uint64)), WINDOW, "INT64 values of 2 dimensions"),
    (put(WINDOW, value=[[0, 5], [6, 7], [0, 0]]), f"{WINDOW}, request 0", "3 pages for 302 rows"),
    (put(WINDOW, 0, 2, value=-1), f"{WINDOW}, request 0, logical page 2", "under a live position"),
    (put(WINDOW, 1, 0, value=-1), f"{WINDOW}, request 1, logical page 0", "under a live position"),
    (put(WINDOW, 1, 1, value=-2), f"{WINDOW}, request 1, logical page 1", "-1 or a block id of at most 16777215"),
    (put(WINDOW, 2, 2, value=2**24), f"{WINDOW}, request 2, logical page 2", "a block id of at most 16777215"),
    (put(WINDOW, 0, 2, value=7), f"{WINDOW}, request 0, logical page 2", "no other live page uses"),
    (put(WINDOW, 0, 2, value=6), f"{WINDOW}, request 0, logical page 2", "no other live page uses"),
    (put(WINDOW, 1, 0, value=7), f"{WINDOW}, request 1, logical page 0", "no other live page uses"),
    # compressed pages
    (drop(COMPRESSED, 2), COMPRESSED, "exactly the keys [1, 2]"),
    (put(COMPRESSED, 4, value=[[0], [0], [0]]), COMPRESSED, "exactly the keys [1, 2]"),
    (put(COMPRESSED, value={}), COMPRESSED, "exactly the keys [1, 2]"),
    (drop(COMPRESSED, 1, 0), f"{RATIO_1}", "one row for each of 3 requests"),
    (put(COMPRESSED, 1, value=[[10, 11], [13, 14], [15, -1]]), f"{RATIO_1}, request 0", "3 pages for 302 rows"),
    (put(COMPRESSED, 2, value=[[20], [22], [23]]), f"{RATIO_2}, request 0", "2 pages for 151 rows"),
    (put(COMPRESSED, 1, 0, 0, value=-1), f"{RATIO_1}, request 0, logical page 0", "under a live position"),
    (put(COMPRESSED, 2, 0, 1, value=-1), f"{RATIO_2}, request 0, logical page 1", "under a live position"),
    (put(COMPRESSED, 2, 1, 0, value=2**40), f"{RATIO_2}, request 1, logical page 0", "at most 16777215"),
    (put(COMPRESSED, 2, 1, 0, value=21), f"{RATIO_2}, request 0, logical page 1", "no other live page uses"),
    (put(COMPRESSED, 2, 1, 0, value=20), f"{RATIO_2}, request 1, logical page 0", "no other live page uses"),
    (put(COMPRESSED, 1, 0, 1, value=12), f"{RATIO_1}, request 0, logical page 2", "no other live page uses"),
    # state blocks
    (drop(STATE, 4), STATE, "exactly the keys [2, 4]"),
    (put(STATE, 6, value=[[0], [1], [2]]), STATE, "exactly the keys [2, 4]"),
    (drop(STATE, 4, 0), f"{STATE}[4]", "one row for each of 3 requests"),
    (put(STATE, 4, value=[[0, 1], [2, 3], [4, 5]]), f"{STATE}[4]", "[3, 1]"),
    (put(STATE, 4, value=[[], [], []]), f"{STATE}[4]", "[3, 1]"),
    (put(STATE, 4, value=[0, 1, 2]), f"{STATE}[4]", "2 dimensions"),
    (put(STATE, 2, 1, value=[-3]), f"{STATE}[2], request 1, logical page 0", "-1 or a block id"),
    (put(STATE, 2, 1, value=[0]), f"{STATE}[2], request 0", "no other live request uses"),
    # what a request without rows will need again
    (put(WINDOW, 2, 0, value=5), f"{WINDOW}, request 0, logical page 2", "no other live page uses"),
    (put(COMPRESSED, 1, 2, 0, value=12), f"{RATIO_1}, request 0, logical page 2", "no other live page uses"),
    (put(COMPRESSED, 2, 2, 0, value=22), f"{RATIO_2}, request 1, logical page 0", "no other live page uses"),
    (put(STATE, 2, 2, value=[0]), f"{STATE}[2], request 0", "no other live request uses"),
    (put(STATE, 4, 2, value=[4]), f"{STATE}[4], request 0", "no other live request uses"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "where", "expected"), BROKEN)
def test_each_broken_batch_is_named(change: Callable[[Arguments], None], where: str, expected: str) -> None:
    broken = copy.deepcopy(arguments())
    change(broken)
    with pytest.raises(MetadataError) as caught:
        build_forward_metadata(**broken)
    assert caught.value.where == where
    assert expected in caught.value.expected


ALLOWED: list[tuple[str, Callable[[Arguments], None]]] = [
    ("a window page behind the window may still be there", put(WINDOW, 0, 0, value=9)),
    ("and may be another request's by now", put(WINDOW, 0, 0, value=7)),
    ("a page that a request without rows has not reached is not its own yet", put(WINDOW, 2, 1, value=5)),
    ("two disabled state blocks are no conflict", put(STATE, 4, 0, value=[-1])),
    ("full pages of a common prefix may be shared", put(COMPRESSED, 1, 0, 0, value=15)),
    ("state blocks of two sources may have one number", put(STATE, 4, 0, value=[0])),
    ("the last position may be reached", put("kv_seq_lens", 2, value=4096)),
]


@pytest.mark.parametrize("change", [change for _, change in ALLOWED], ids=[reason for reason, _ in ALLOWED])
def test_what_is_no_mistake_passes(change: Callable[[Arguments], None]) -> None:
    allowed = copy.deepcopy(arguments())
    change(allowed)
    build_forward_metadata(**allowed)


@pytest.mark.parametrize(("stored", "closes"), [(200, False), (201, True)])
def test_a_shared_page_is_refused_only_when_the_step_writes_it(stored: int, closes: bool) -> None:
    """Two requests with the same prefix, one token each: ratio 2 writes nothing where no group closes."""
    prefix: Arguments = {
        "config": TINY,
        "query_start_loc": [0, 1, 2],
        "kv_seq_lens": [stored, stored],
        "window_block_table": [[0, 1], [2, 3]],
        "compressed_block_tables": {1: [[4, 5], [4, 6]], 2: [[7], [7]]},
        "state_block_tables": {2: [[0], [1]], 4: [[0], [1]]},
    }
    if closes:
        with pytest.raises(MetadataError, match=r"compressed_block_tables\[2\] of .* 2, 4, request 0, logical page 0"):
            build_forward_metadata(**prefix)
    else:
        assert build_forward_metadata(**prefix).compressed_slots[2].tolist() == [-1, -1]


@pytest.mark.parametrize(("stored", "first_page_is_seen"), [(127, True), (142, True), (143, False), (270, False)])
def test_a_page_is_needed_up_to_its_last_row_in_the_window(stored: int, first_page_is_seen: bool) -> None:
    """TINY sees 16 tokens: position 142 sees 127, the last row of page 0; position 143 sees 128 and later."""
    decode: Arguments = {
        "config": TINY,
        "query_start_loc": [0, 1],
        "kv_seq_lens": [stored],
        "window_block_table": [[-1, 8, 9]],
        "compressed_block_tables": {1: [[4, 5, 6]], 2: [[7, 8]]},
        "state_block_tables": {2: [[0]], 4: [[1]]},
    }
    if first_page_is_seen:
        with pytest.raises(MetadataError, match="window_block_table, request 0, logical page 0"):
            build_forward_metadata(**decode)
    else:
        assert (build_forward_metadata(**decode).window_indices >= 128).all()


def test_packed_rows_beyond_int32_are_refused_before_anything_is_allocated() -> None:
    requests = 2048  # of 2**20 rows each
    with pytest.raises(MetadataError, match="query_start_loc: expected at most 2147483647 packed rows"):
        build_forward_metadata(
            FLASH, np.arange(requests + 1) * FLASH.max_position_embeddings, np.zeros(requests, dtype=int), [], {}, {}
        )


def test_tables_of_an_empty_batch() -> None:
    with pytest.raises(MetadataError, match=r"window_block_table: expected one row for each of 0 requests"):
        build_forward_metadata(TINY, [0], [], [[1]], {1: [], 2: []}, {2: [], 4: []})
    with pytest.raises(MetadataError, match="rectangular"):
        build_forward_metadata(TINY, [0], [], [[1], [1, 2]], {1: [], 2: []}, {2: [], 4: []})


def test_a_request_without_tokens_owns_nothing_yet() -> None:
    allowed = copy.deepcopy(arguments())
    for change in (
        put("kv_seq_lens", 2, value=0),
        put(STATE, 2, 2, value=[0]),
        put(WINDOW, 2, 0, value=5),
        put(COMPRESSED, 1, 2, 0, value=12),
        put(COMPRESSED, 2, 2, 0, value=21),
    ):
        change(allowed)
    assert build_forward_metadata(**allowed).new_kv_seq_lens.tolist() == [302, 140, 0]


def test_a_table_may_be_too_short_for_a_request_that_does_not_run() -> None:
    """300 tokens stored, swapped out: one page in the tables, which are as wide as the running request needs."""
    batch: Arguments = {
        "config": TINY,
        "query_start_loc": [0, 1, 1],
        "kv_seq_lens": [5, 300],
        "window_block_table": [[4], [5]],
        "compressed_block_tables": {1: [[4], [5]], 2: [[4], [5]]},
        "state_block_tables": {2: [[0], [1]], 4: [[0], [1]]},
    }
    assert build_forward_metadata(**batch).compressed_seq_lens[6].tolist() == [6, 300]
    batch["compressed_block_tables"][1][1] = [4]
    with pytest.raises(MetadataError, match="KV source layers 6, request 0, logical page 0"):
        build_forward_metadata(**batch)
