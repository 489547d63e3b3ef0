"""Which batches are refused, and what the error names, against a slow list of faults written from the contract.

The contract: a step reads, for each of its tokens, the window rows of the last `sliding_window` positions, and every
compressed row whose last token is not after it; it writes its own positions and the compressed rows that they close.
A request without rows will read the same for its next token. What is read or written must have a block; a block that
is written must be live nowhere else in the DP group, and a state block is one request's. A request without a state
block at any source of a ratio has no compressed rows of that ratio.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from v41_config import TINY, MetadataError, build_forward_metadata

Arguments = dict[str, Any]
Page = tuple[int, int]

ROWS = 128
SOURCES = {1: [6], 2: [2, 4]}
POOLS = {"window": 0, "c1a_cmp_kv": 1, "c2a_cmp_kv": 2}


def faults(arguments: Arguments) -> set[str]:
    """Everything an error may name: table, and the request and page where there is one."""
    stored = arguments["kv_seq_lens"]
    lens = [stop - start for start, stop in itertools.pairwise(arguments["query_start_loc"])]
    groups = arguments["dp_group_start_loc"]
    group_of = [sum(r >= start for start in groups[1:-1]) for r in range(len(stored))]
    pools = arguments["pool_blocks"] or dict.fromkeys([*POOLS, "c2a_state"], 2**24)
    states = arguments["state_block_tables"]
    found: set[str] = set()
    for pool, ratio in POOLS.items():
        name, table = "window_block_table", arguments["window_block_table"]
        if ratio:
            name = f"compressed_block_tables[{ratio}] of KV source layers {', '.join(map(str, SOURCES[ratio]))}"
            table = arguments["compressed_block_tables"][ratio]
        live: dict[Page, int] = {}
        written: set[Page] = set()
        for r, (length, rows) in enumerate(zip(stored, lens, strict=True)):
            found |= {f"{name}, request {r}, logical page {p}" for p, block in enumerate(table[r])
                      if not -1 <= block < pools[pool]}  # fmt: skip
            if ratio == 2 and all(states[source][r][0] < 0 for source in SOURCES[2]):
                continue
            reads, writes = touched_rows(length, rows, ratio)
            pages = {row // ROWS for row in reads | writes}
            if rows and pages and max(pages) >= len(table[r]):
                found.add(f"{name}, request {r}")
            for p in pages:
                if p < len(table[r]) and table[r][p] >= 0:
                    live[r, p] = table[r][p]
                elif p < len(table[r]) and rows:
                    found.add(f"{name}, request {r}, logical page {p}")
            written |= {(r, row // ROWS) for row in writes}
        users = Counter((group_of[r], block) for (r, _), block in live.items())
        found |= {f"{name}, request {r}, logical page {p}" for r, p in written
                  if (r, p) in live and users[group_of[r], live[r, p]] > 1}  # fmt: skip
    for source, table in states.items():
        found |= {f"state_block_tables[{source}], request {r}, logical page 0" for r, (block,) in enumerate(table)
                  if not -1 <= block < pools["c2a_state"]}  # fmt: skip
        owners = {r: (group_of[r], table[r][0]) for r in range(len(stored)) if stored[r] + lens[r] and table[r][0] >= 0}
        shared = Counter(owners.values())
        found |= {f"state_block_tables[{source}], request {r}" for r, owner in owners.items() if shared[owner] > 1}
    return found


def touched_rows(stored: int, rows: int, ratio: int) -> tuple[set[int], set[int]]:
    """Rows read and rows written by the new tokens; ratio 0 is the window. Without new tokens: what the next reads."""
    new = list(range(stored, stored + rows))
    readers = new or [stored]
    if ratio == 0:
        seen = {p for token in readers for p in range(token - TINY.sliding_window + 1, token + 1) if p >= 0}
        return (seen if new else seen - {stored}), set(new)
    length = stored + rows
    return {row for row in range(length) if (row + 1) * ratio <= length}, {
        token // ratio for token in new if token % ratio == ratio - 1
    }


@st.composite
def arguments_around_validity(draw: st.DrawFn) -> Arguments:
    """A valid batch with a few entries overwritten by what is likely to collide, be missing, or leave the pool."""
    lens = draw(st.lists(st.one_of(st.just(0), st.integers(1, 6), st.integers(100, 200)), min_size=1, max_size=4))
    stored = [draw(st.one_of(st.integers(0, 20), st.integers(110, 290))) for _ in lens]
    count = len(lens)
    columns = [-(-(s + n) // ROWS) for s, n in zip(stored, lens, strict=True)]
    width = max(columns) + draw(st.integers(0, 1))
    cut = draw(st.integers(0, count))

    def table(pages: int) -> list[list[int]]:
        blocks = iter(draw(st.permutations(range(count * pages + 2))))
        return [[next(blocks) for _ in range(pages)] for _ in range(count)]

    arguments: Arguments = {
        "config": TINY,
        "query_start_loc": [0, *itertools.accumulate(lens)],
        "kv_seq_lens": stored,
        "window_block_table": table(width),
        "compressed_block_tables": {1: table(width), 2: table(-(-width // 2))},
        "state_block_tables": {source: table(1) for source in (2, 4)},
        "dp_group_start_loc": draw(st.sampled_from([[0, count], [0, cut, count]])),
        "pool_blocks": draw(st.sampled_from([None, dict.fromkeys([*POOLS, "c2a_state"], count * width + 2)])),
    }
    for _ in range(draw(st.integers(0, 3))):
        tables = [arguments["window_block_table"]]
        tables += [*arguments["compressed_block_tables"].values(), *arguments["state_block_tables"].values()]
        changed = draw(st.sampled_from(tables))
        row = changed[draw(st.integers(0, count - 1))]
        if row:
            entries = st.one_of(st.just(-1), st.integers(0, 6), st.sampled_from([-2, 2**24 - 1, 2**24]))
            row[draw(st.integers(0, len(row) - 1))] = draw(entries)
    if draw(st.integers(0, 9)) == 0 and width > 1:
        arguments["window_block_table"] = [row[:-1] for row in arguments["window_block_table"]]
    return arguments


def lower(arguments: Arguments) -> None:
    tables = {ratio: np.array(table, dtype=np.int32) for ratio, table in arguments["compressed_block_tables"].items()}
    build_forward_metadata(**{**arguments, "compressed_block_tables": tables})


def refusal(arguments: Arguments) -> str | None:
    """Where the error was, None where the batch was lowered."""
    try:
        lower(arguments)
    except MetadataError as error:
        return error.where
    return None


@settings(max_examples=300, deadline=None)
@given(arguments_around_validity())
def test_refused_exactly_where_there_is_a_fault(arguments: Arguments) -> None:
    expected = faults(arguments)
    before = copy.deepcopy(arguments)
    refused_at = refusal(arguments)
    assert refused_at in expected if expected else refused_at is None
    assert arguments == before


def decode_of_two() -> Arguments:
    return {
        "config": TINY,
        "query_start_loc": [0, 1, 1],
        "kv_seq_lens": [131, 40],
        "window_block_table": [[3, 4], [5, 6]],
        "compressed_block_tables": {1: [[0, 1], [2, 3]], 2: [[0], [1]]},
        "state_block_tables": {2: [[0], [1]], 4: [[1], [0]]},
        "dp_group_start_loc": [0, 2],
        "pool_blocks": None,
    }


def test_the_list_of_faults_by_hand() -> None:
    """Request 0 reads positions 116 to 131 and writes 131; request 1 has no rows and will read 25 to 39."""
    assert touched_rows(131, 1, 0) == (set(range(116, 132)), {131})
    assert touched_rows(40, 0, 0) == (set(range(25, 40)), set())
    assert touched_rows(131, 1, 2) == (set(range(66)), {65})
    batch = decode_of_two()
    assert faults(batch) == set()
    batch["window_block_table"][1][0] = 4  # request 0 writes block 4
    assert faults(batch) == {"window_block_table, request 0, logical page 1"}
    batch["dp_group_start_loc"] = [0, 1, 2]  # but not the block 4 of the other group's pool
    assert faults(batch) == set()
    batch["state_block_tables"] = {2: [[0], [-1]], 4: [[1], [1]]}
    batch["compressed_block_tables"][2][1] = [0]
    assert faults(batch) == set()
    batch["dp_group_start_loc"] = [0, 2]
    batch["window_block_table"][1][0] = 3  # read by both, written by none
    ratio_2 = "compressed_block_tables[2] of KV source layers 2, 4, request 0, logical page 0"
    assert faults(batch) == {ratio_2, "state_block_tables[4], request 0", "state_block_tables[4], request 1"}
    batch["state_block_tables"] = {2: [[0], [-1]], 4: [[1], [-1]]}  # request 1 has no ratio-2 rows any more
    assert faults(batch) == set()


POOL_SIZES = {"window": 7, "c1a_cmp_kv": 4, "c2a_cmp_kv": 2, "c2a_state": 2}


def test_block_ids_up_to_the_pools_last_are_lowered() -> None:
    lower({**decode_of_two(), "pool_blocks": POOL_SIZES})


@pytest.mark.parametrize(
    ("pool", "where", "expected"),
    [
        ("window", "window_block_table, request 1, logical page 1", "at most 5, the pool's last"),
        ("c1a_cmp_kv", "compressed_block_tables[1] of KV source layers 6, request 1, logical page 1", "at most 2"),
        ("c2a_cmp_kv", "compressed_block_tables[2] of KV source layers 2, 4, request 1, logical page 0", "at most 0"),
        ("c2a_state", "state_block_tables[2], request 1, logical page 0", "at most 0, the pool's last"),
    ],
)
def test_a_block_id_outside_its_pool(pool: str, where: str, expected: str) -> None:
    with pytest.raises(MetadataError) as caught:
        lower({**decode_of_two(), "pool_blocks": {**POOL_SIZES, pool: POOL_SIZES[pool] - 1}})
    assert caught.value.where == where
    assert expected in caught.value.expected


@pytest.mark.parametrize(
    ("changes", "where", "expected"),
    [
        ({"pool_blocks": {"window": 7}}, "pool_blocks", "exactly the keys ['c1a_cmp_kv', 'c2a_cmp_kv', 'c2a_state'"),
        ({"pool_blocks": {**POOL_SIZES, "window": -1}}, "pool_blocks, window", "a number of blocks"),
        ({"dp_group_start_loc": [0]}, "dp_group_start_loc", "at least 2, one more than groups"),
        ({"dp_group_start_loc": [1, 2]}, "dp_group_start_loc[0]", "0"),
        ({"dp_group_start_loc": [0, 3, 2]}, "dp_group_start_loc, group 1", "nondecreasing"),
        ({"dp_group_start_loc": [0, 1]}, "dp_group_start_loc[-1]", "2, the number of requests"),
        ({"dp_group_start_loc": [0.0, 2.0]}, "dp_group_start_loc", "INT64 values of 1 dimensions"),
    ],
)
def test_groups_and_pools_that_cannot_be(changes: Arguments, where: str, expected: str) -> None:
    with pytest.raises(MetadataError) as caught:
        lower({**decode_of_two(), **changes})
    assert caught.value.where == where
    assert expected in caught.value.expected


def test_the_second_groups_requests_are_named_by_their_place_in_the_step() -> None:
    """A third request that is a copy of the second: in one group they write the same pages."""
    batch = decode_of_two()
    batch |= {"kv_seq_lens": [131, 40, 40], "query_start_loc": [0, 1, 2, 3], "dp_group_start_loc": [0, 1, 2, 3]}
    for table in (batch["window_block_table"], *batch["compressed_block_tables"].values()):
        table.append(list(table[1]))
    for state in batch["state_block_tables"].values():
        state.append(list(state[1]))
    lower(batch)
    batch["dp_group_start_loc"] = [0, 1, 3]
    with pytest.raises(MetadataError, match="window_block_table, request 1, logical page 0"):
        lower(batch)
    batch["window_block_table"][2] = [1, 2]
    with pytest.raises(MetadataError, match=r"state_block_tables\[2\], request 1"):
        lower(batch)
