"""Blocks and bytes of one rank's caches, against hand counts and the published footprint."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from v41_config import (
    FLASH,
    TINY,
    CacheLayout,
    LayoutError,
    ParallelLayout,
    SourceTokens,
    build_forward_metadata,
    cache_pools,
)

NODE = ParallelLayout(tp=4, dp=2)


def for_rank(rank: int = 0, layout: ParallelLayout = NODE, **changes: Any) -> CacheLayout:
    sizes: dict[str, Any] = {"requests": 2, "context": SourceTokens(1 << 20), "step_tokens": SourceTokens(1)}
    return CacheLayout.for_rank(FLASH, layout, rank, **{**sizes, **changes})


def test_one_request_of_a_million_tokens() -> None:
    """890 bytes a token are 0.93 GB; 40 windows of two blocks and three state blocks come on top."""
    one = for_rank(requests=1, layout=ParallelLayout(4, 1))
    assert one.blocks == {"window": 2, "c2a_cmp_kv": 4096, "c1a_cmp_kv": 8192, "c2a_state": 1}
    assert one.bytes_by_pool == {
        "window": 40 * 2 * 128 * 528,
        "c2a_cmp_kv": 3 * 524288 * 288,
        "c2a_index_key": 3 * 524288 * 68,
        "c2a_state": 3 * 16384,
        "c1a_cmp_kv": 1048576 * 288,
        "c1a_index_key": 1048576 * 68,
    }
    assert one.total_bytes == 890 * 1048576 + 40 * 2 * 128 * 528 + 3 * 16384
    assert one.total_bytes / 1e9 == pytest.approx(0.94, rel=0.01)


def test_ranks_of_a_tp_group_hold_the_same_and_dp_groups_share_the_requests() -> None:
    layouts = [for_rank(rank, requests=7) for rank in range(8)]
    assert [layout.blocks["c2a_state"] for layout in layouts] == [4] * 4 + [3] * 4
    assert [layout.blocks["c1a_cmp_kv"] for layout in layouts] == [4 * 8192] * 4 + [3 * 8192] * 4
    assert [list(layout.replica_ranks) for layout in layouts] == [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4
    assert [layout.rank for layout in layouts] == list(range(8))


def test_tensors_are_the_pools_with_their_blocks() -> None:
    layout = for_rank(requests=2, context=SourceTokens(1000))
    tensors = {(t.pool.name, t.layer_id, t.part): (t.shape, t.dtype) for t in layout.tensors()}
    assert tensors["window", 39, "scale"] == ((2, 128, 1, 16), "float8_e8m0fnu")
    assert tensors["c2a_cmp_kv", 8, "payload"] == ((4, 128, 1, 256), "uint8")
    assert tensors["c1a_index_key", 20, "scale"] == ((8, 128, 1, 4), "float8_e8m0fnu")
    assert tensors["c2a_state", 14, "payload"] == ((1, 4, 1024), "float32")
    assert ("c2a_state", 14, "scale") not in tensors
    widths = {"float8_e4m3fn": 1, "float8_e8m0fnu": 1, "uint8": 1, "float32": 4}
    assert layout.total_bytes == sum(int(np.prod(shape)) * widths[dtype] for shape, dtype in tensors.values())
    owned = sum(len(pool.owner_layers) * (1 if pool.scale is None else 2) for pool in cache_pools(FLASH))
    assert len(tensors) == len(list(layout.tensors())) == owned


@given(chunk=st.integers(1, 400), stored=st.integers(0, 4096))
def test_a_request_never_needs_more_window_pages_than_its_share(chunk: int, stored: int) -> None:
    """Keep only the pages of one step of `chunk` tokens at `stored`: the step can be lowered with them."""
    chunk = min(chunk, TINY.max_position_embeddings - stored)
    if chunk == 0:
        return
    layout = CacheLayout.for_rank(
        TINY, ParallelLayout(), 0, requests=1, context=SourceTokens(4096), step_tokens=SourceTokens(chunk)
    )
    pages = np.arange(32)
    kept = (pages * 128 < stored + chunk) & ((pages + 1) * 128 > stored - TINY.sliding_window + 1)
    assert np.count_nonzero(kept) <= layout.blocks["window"] <= 32
    table = np.where(kept, np.cumsum(kept) - 1, -1)[None]
    full = np.arange(32)[None]
    lowered = build_forward_metadata(
        TINY, [0, chunk], [stored], table, {1: full, 2: full}, {source: [[0]] for source in (2, 4)}
    )
    assert lowered.window_slots.max() < layout.blocks["window"] * 128


def test_a_whole_prompt_in_one_step_keeps_every_window_page() -> None:
    assert for_rank(step_tokens=SourceTokens(1 << 20)).blocks["window"] == 8192
    assert for_rank(requests=0).total_bytes == 0
    assert for_rank(context=SourceTokens(0)).blocks == {"window": 0, "c2a_cmp_kv": 0, "c1a_cmp_kv": 0, "c2a_state": 1}


@pytest.mark.parametrize(
    ("changes", "where", "expected"),
    [
        ({"rank": 8}, "rank", "0 <= rank < world_size = 8"),
        ({"rank": -1}, "rank", "0 <= rank < world_size = 8"),
        ({"requests": -1}, "requests", "at least 0"),
        ({"context": (1 << 20) + 1}, "context", "0 to max_position_embeddings = 1048576"),
        ({"context": -1}, "context", "0 to max_position_embeddings = 1048576"),
        ({"step_tokens": 0}, "step_tokens", "at least 1 token"),
        ({"requests": 2 * 2049}, "block table c1a_cmp_kv", "at most 16777216: rows are INT32"),
    ],
)
def test_impossible_layouts(changes: dict[str, Any], where: str, expected: str) -> None:
    with pytest.raises(LayoutError) as caught:
        for_rank(**changes)
    assert (caught.value.where, caught.value.expected) == (where, expected)


def test_the_last_block_an_int32_row_can_reach() -> None:
    assert for_rank(requests=2 * 2048).blocks["c1a_cmp_kv"] == 2**24
