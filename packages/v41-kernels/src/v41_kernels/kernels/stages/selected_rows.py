"""From a row of scores to the physical rows of the best entries, in position order (model.md section 10)."""

from typing import Any

import pypto

from v41_kernels.kernels.stages.index_scores import BLOCK_ROWS
from v41_kernels.kernels.stages.rows import column_indices
from v41_kernels.kernels.stages.selection import NOTHING, best_scores, cutoff, taken
from v41_kernels.kernels.stages.tile_shapes import tile_columns

ENTRY_TILE = 1024
# Why: 1,024 entries beside the 512 best so far are a row of 6 KB for the sorter, and a running count over more than
# 1,024 columns is refused by the compiler.
_NOWHERE = -1e9  # behind every position, all of which are negated here: the best key is the lowest position


def scores_of_chunk(scores: Any, first: Any, live: Any, C: int) -> Any:
    """FP32 `[1, C]` of BF16 `scores` `[1, ...]` from `first` on; -inf behind the `live` ones."""
    pypto.set_vec_tile_shapes(1, C)
    cut = pypto.view(scores, [1, C], [0, first], valid_shape=[1, live])
    return pypto.fillpad(pypto.cast(cut, pypto.DT_FP32), "constant", NOTHING)


def inside_blocks(scores: Any, kept_blocks: Any, token: Any, first: Any, blocks: int, C: int, size: int) -> Any:
    """FP32 `scores` `[1, C]` of entries `first ...`, -inf outside the token's kept blocks (INT8 `[T, blocks]`)."""
    count = C // size
    pypto.set_vec_tile_shapes(1, max(count, 32))
    block = first // size
    live = pypto.max(pypto.min(blocks - block, count), 0)
    kept = pypto.view(kept_blocks, [1, count], [token, block], valid_shape=[1, live])
    kept = pypto.fillpad(pypto.cast(kept, pypto.DT_FP16), "constant", 0.0)
    column = pypto.reshape(pypto.cast(kept, pypto.DT_FP32), [count, 1])
    pypto.set_vec_tile_shapes(min(count, 128), max(size, 16))
    entries = pypto.reshape(pypto.expand_clone(column, [count, size]), [1, C])
    pypto.set_vec_tile_shapes(1, C)
    return pypto.where(pypto.gt(entries, 0.5), scores, NOTHING)


def eligible(scores: Any, length: Any, first: Any, C: int, kept_blocks: Any, token: Any, blocks: int, size: int) -> Any:
    """FP32 `[1, C]` of `scores` from `first` on; -inf behind the last entry and outside `kept_blocks`, if any."""
    part = scores_of_chunk(scores, first, pypto.min(length - first, C), C)
    return part if kept_blocks is None else inside_blocks(part, kept_blocks, token, first, blocks, C, size)


def write_best_rows(
    scores: Any,
    length: Any,
    table: Any,
    request: Any,
    topk_rows: Any,
    token: Any,
    K: int,
    capacity: int,
    kept_blocks: Any = None,
    blocks: int = 0,
    size: int = 8,
) -> None:
    """Writes a token's row of `topk_rows`: its best `K` of `length` entries, ascending, then -1.

    `scores` BF16 `[1, capacity]`. Only entries of `kept_blocks` count, if there are any.
    """
    C = min(capacity, ENTRY_TILE)
    best = pypto.tensor([1, K], pypto.DT_FP32, "best_entries")
    keys = pypto.tensor([1, K], pypto.DT_FP32, "best_positions")
    base = pypto.tensor([1, 1], pypto.DT_FP32, "base_entry")
    seen = pypto.tensor([1, 1], pypto.DT_FP32, "equal_entries")
    pypto.set_vec_tile_shapes(1, tile_columns(K, K + 16))
    best[:] = pypto.full([1, K], NOTHING, pypto.DT_FP32)
    keys[:] = pypto.full([1, K], _NOWHERE, pypto.DT_FP32)
    base[:] = pypto.full([1, 1], 0.0, pypto.DT_FP32)
    seen[:] = pypto.full([1, 1], 0.0, pypto.DT_FP32)
    chunks = (length + C - 1) // C
    for chunk in pypto.loop(chunks, name="ENTRY_SCORES", idx_name="entry_chunk"):
        first = chunk * C
        part = eligible(scores, length, first, C, kept_blocks, token, blocks, size)
        best[:] = best_scores(best, part, K, C)
    for chunk in pypto.loop(chunks, name="ENTRY_CHOICE", idx_name="pick_chunk"):
        first = chunk * C
        part = eligible(scores, length, first, C, kept_blocks, token, blocks, size)
        last, room = cutoff(best, K)
        chosen, equal = taken(part, last, room, seen, C)
        numbers = column_indices(C)
        pypto.set_vec_tile_shapes(1, C)
        found = pypto.where(pypto.gt(chosen, 0.5), (numbers + base) * (-1.0), _NOWHERE)
        keys[:] = best_scores(keys, found, K, C)
        seen[:] = equal
        base[:] = base + float(C)
    write_physical_rows(keys, length, table, request, topk_rows, token, K)


def write_physical_rows(keys: Any, length: Any, table: Any, request: Any, topk_rows: Any, token: Any, K: int) -> None:
    """Writes `block * 128 + offset` of negated positions FP32 `[1, K]`, -1 for those that are nowhere.

    Pages are walked in order: each gives its block to the positions that stand in it.
    """
    block = pypto.tensor([1, K], pypto.DT_FP32, "block")
    page = pypto.tensor([1, 1], pypto.DT_FP32, "page")
    pypto.set_vec_tile_shapes(1, tile_columns(K, K + 16))
    block[:] = pypto.full([1, K], 0.0, pypto.DT_FP32)
    page[:] = pypto.full([1, 1], 0.0, pypto.DT_FP32)
    for column in pypto.loop((length + BLOCK_ROWS - 1) // BLOCK_ROWS, name="PAGES", idx_name="page_column"):
        pypto.set_vec_tile_shapes(1, tile_columns(K, K + 16))
        here = pypto.cast(pypto.view(table, [1, 1], [request, column]), pypto.DT_FP32)
        page_of = pypto.floor(keys * (-1.0 / BLOCK_ROWS))
        block[:] = pypto.where(pypto.eq(page_of, page), here, block)
        page[:] = page + 1.0
    for _ in pypto.loop(1, name="ROWS", idx_name="rows_once"):
        pypto.set_vec_tile_shapes(1, tile_columns(K, K + 16))
        live = pypto.gt(keys, 0.5 * _NOWHERE)
        offset = keys * (-1.0) - pypto.floor(keys * (-1.0 / BLOCK_ROWS)) * float(BLOCK_ROWS)
        first = pypto.where(live, block, 0.0)
        within = pypto.where(live, offset, -1.0)
        # As INT32: a row number of a large pool has more bits than FP32.
        rows = pypto.cast(first, pypto.DT_INT32) * BLOCK_ROWS + pypto.cast(within, pypto.DT_INT32)
        pypto.assemble(rows, [token, 0], topk_rows)
