"""Block tables: logical pages of a request to physical blocks, checked before a step reads or writes through them.

A step must find a block under every position it touches, and a block that one request writes must not be one that
another still needs. Each error names table, request and logical page.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from v41_config.batch_checks import checked_integers, first_true
from v41_config.cache_abi import BLOCK_ROWS, MAX_BLOCK
from v41_config.errors import MetadataError
from v41_config.ragged_ranges import ragged_ranges

_Array = npt.NDArray[Any]


class BlockTable(NamedTuple):
    """`blocks` INT32 `[B, pages]`, -1 or at most `highest`; the caller's own array where that is such a one."""

    name: str
    blocks: _Array
    highest: int

    def physical_rows(self, request: _Array, row: _Array) -> _Array:
        """INT64 physical rows of requests' logical rows, both INT64."""
        page = row // BLOCK_ROWS
        rows: _Array = (self.blocks[request, page] - page) * BLOCK_ROWS + row
        return rows


class PageUse(NamedTuple):
    """What a step does with a table's rows, counted in the table's own unit: tokens, or compressed rows; `[B]` each.

    Requests that `touch` the table read rows `[first_read, stop)` and write those of `[first_write, stop)`. All that
    are `kept`, touched or not, need what they have of `[first_read, stop)` now or later.
    """

    first_read: _Array
    first_write: _Array
    stop: _Array
    touches: _Array
    kept: _Array


def checked_block_table(name: str, table: object, requests: int, pool_blocks: int | None = None) -> BlockTable:
    """A table of -1 and block ids below `pool_blocks`, or, where that is unknown, of blocks whose rows are INT32."""
    is_empty_list = isinstance(table, Sequence) and not table  # of an empty batch: it has one dimension only
    array = checked_integers(name, np.zeros((0, 0), dtype=np.int32) if is_empty_list else table, 2)
    if len(array) != requests:
        raise MetadataError(name, f"{len(array)} rows", f"one row for each of {requests} requests")
    limit = MAX_BLOCK if pool_blocks is None else min(pool_blocks - 1, MAX_BLOCK)
    highest = int(array.max(initial=-1))
    if highest > limit or int(array.min(initial=-1)) < -1:
        bad = (array < -1) | (array > limit)
        expected = f"-1 or a block id of at most {limit}"
        raise MetadataError(_page_of(name, *np.argwhere(bad)[0]), int(array[bad][0]),
                            expected if pool_blocks is None else f"{expected}, the pool's last")  # fmt: skip
    return BlockTable(name, np.ascontiguousarray(array, dtype=np.int32), highest)


def checked_state_table(
    source: int, table: object, live: _Array, dp_groups: _Array, pool_blocks: int | None = None
) -> _Array:
    """A state table `[B, 1]` as INT32: -1, or a block that no other `live` request of the DP group has."""
    checked = checked_block_table(f"state_block_tables[{source}]", table, len(live), pool_blocks)
    blocks = checked.blocks
    if len(live) and blocks.shape[1] != 1:
        raise MetadataError(checked.name, f"shape {blocks.shape}", f"[{len(live)}, 1]")
    blocks = blocks.reshape(len(live), 1)
    owned = np.where(live, blocks[:, 0], -1)
    for start, stop in itertools.pairwise(dp_groups):
        in_order = np.sort(owned[start:stop])
        again = in_order[1:][(in_order[1:] == in_order[:-1]) & (in_order[1:] >= 0)]
        if again.size:
            request = int(start + np.isin(owned[start:stop], again).argmax())
            expected = "a block that no other live request uses"
            raise MetadataError(f"{checked.name}, request {request}", int(owned[request]), expected)
    own: _Array = blocks.copy()
    return own


def check_pages(table: BlockTable, use: PageUse, dp_groups: _Array) -> None:
    """Every row that a step touches has a block, and the blocks it writes are the writer's alone."""
    pages = table.blocks.shape[1]
    first_page, write_page = use.first_read // BLOCK_ROWS, use.first_write // BLOCK_ROWS
    stop_page = -(-use.stop // BLOCK_ROWS)
    if (request := first_true(use.touches & (stop_page > pages))) is not None:
        raise MetadataError(f"{table.name}, request {request}", f"{pages} pages",
                            f"{int(stop_page[request])} pages for {int(use.stop[request])} rows")  # fmt: skip
    _check_present(table, first_page, stop_page, use.touches)
    live = _Pages(first_page, np.maximum(np.minimum(stop_page, pages) - first_page, 0) * use.kept)
    written = _Pages(write_page, (stop_page - write_page) * (use.touches & (use.first_write < use.stop)))
    for start, stop in itertools.pairwise(dp_groups.tolist()):
        _check_single_writer(table, start, live.of(start, stop), written.of(start, stop))


class _Pages(NamedTuple):
    """Runs of logical pages, `[B]`: the first one and how many."""

    first: _Array
    length: _Array

    def of(self, start: int, stop: int) -> _Pages:
        return _Pages(self.first[start:stop], self.length[start:stop])


def _check_present(table: BlockTable, first_page: _Array, stop_page: _Array, touches: _Array) -> None:
    """No -1 on the pages that a step touches."""
    requests = (touches & (first_page < stop_page)).nonzero()[0]
    if not len(requests):
        return
    bounds = np.empty((len(requests), 2), dtype=np.int64)
    bounds[:, 0], bounds[:, 1] = first_page[requests], stop_page[requests]
    bounds += (requests * table.blocks.shape[1])[:, None]
    # reduceat takes no bound at the end of the table, and goes there after the last one
    flat = bounds.ravel() if bounds[-1, 1] < table.blocks.size else bounds.ravel()[:-1]
    lowest = np.minimum.reduceat(table.blocks.ravel(), flat)[::2]
    if (at := first_true(lowest < 0)) is not None:
        request = int(requests[at])
        touched = table.blocks[request, first_page[request] : stop_page[request]]
        page = int(first_page[request] + (touched < 0).argmax())
        raise MetadataError(_page_of(table.name, request, page), -1, "a physical block under a live position")


def _check_single_writer(table: BlockTable, first_request: int, live: _Pages, written: _Pages) -> None:
    """A block that one request of a DP group writes is live nowhere else in the group."""
    blocks = table.blocks[first_request : first_request + len(live.first)]
    request, page = ragged_ranges(*written)
    if not len(request):
        return
    writes = blocks[request, page]
    ordered = np.sort(writes)
    is_written = np.zeros(table.highest + 2, dtype=np.bool_)  # its last entry is that of -1
    is_written[writes] = True
    # To look at a whole table is faster than to expand what is live of it, unless that is little, as in a window.
    suspects = blocks if 4 * live.length.sum() > blocks.size else blocks[ragged_ranges(*live)]
    # Clipping is faster than to look at each sign, and takes -1 for block 0.
    hits = is_written.take(suspects, mode="raise" if is_written[0] else "clip")
    if np.count_nonzero(hits) == len(writes) and not (ordered[1:] == ordered[:-1]).any():
        return  # each written page was met as itself; anything else is a conflict, or an old entry of a dead page
    users = blocks[ragged_ranges(*live)]
    block, count = np.unique(users[is_written.take(users)], return_counts=True)
    shared = np.isin(writes, block[count > 1])
    if (at := first_true(shared)) is not None:
        raise MetadataError(_page_of(table.name, first_request + int(request[at]), int(page[at])), int(writes[at]),
                            "a block that no other live page uses, since this step writes it")  # fmt: skip


def _page_of(table_name: str, request: int, page: int) -> str:
    return f"{table_name}, request {request}, logical page {page}"
