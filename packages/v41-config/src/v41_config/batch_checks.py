"""What a batch must satisfy before it is lowered: each check names request, table and logical page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from v41_config.cache_abi import BLOCK_ROWS, MAX_BLOCK
from v41_config.errors import MetadataError
from v41_config.model_config import INT32_MAX, ModelConfig

_Array = npt.NDArray[Any]


def _integers(name: str, values: object, ndim: int) -> _Array:
    """`values` as an INT64 array of `ndim` dimensions; bool, float, unsigned 64-bit and ragged input are refused."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise MetadataError(name, values, f"a rectangular array of {ndim} dimensions") from None
    if array.size == 0 and array.dtype == np.float64:
        array = array.astype(np.int64)  # an empty list has no integer dtype of its own
    if array.ndim != ndim or array.dtype.kind not in "iu" or not np.can_cast(array.dtype, np.int64):
        raise MetadataError(name, f"{array.dtype} of shape {array.shape}", f"INT64 values of {ndim} dimensions")
    return array.astype(np.int64)


def checked_lengths(
    config: ModelConfig, query_start_loc: Sequence[int] | _Array, kv_seq_lens: Sequence[int] | _Array
) -> tuple[_Array, _Array]:
    """`(query_start_loc [B+1], kv_seq_lens [B])` as INT64."""
    starts = _integers("query_start_loc", query_start_loc, 1)
    stored = _integers("kv_seq_lens", kv_seq_lens, 1)
    if len(starts) != len(stored) + 1:
        raise MetadataError("query_start_loc", f"{len(starts)} entries", f"{len(stored) + 1}, one more than requests")
    if starts[0] != 0:
        raise MetadataError("query_start_loc[0]", int(starts[0]), "0")
    if (request := _first(starts[1:] < starts[:-1])) is not None:
        raise MetadataError(f"query_start_loc, request {request}", starts[request : request + 2].tolist(),
                            "nondecreasing starts")  # fmt: skip
    if (request := _first(stored < 0)) is not None:
        raise MetadataError(f"kv_seq_lens, request {request}", int(stored[request]), "a length of at least 0")
    query_lens = np.diff(starts)
    limit = config.max_position_embeddings
    if (request := _first(stored > limit - query_lens)) is not None:  # their sum could overflow
        raise MetadataError(f"kv_seq_lens, request {request}",
                            f"{stored[request]} stored and {query_lens[request]} new tokens",
                            f"at most max_position_embeddings = {limit} tokens together")  # fmt: skip
    if starts[-1] > INT32_MAX:
        raise MetadataError("query_start_loc", int(starts[-1]), f"at most {INT32_MAX} packed rows")
    return starts, stored


def _first(bad: _Array) -> int | None:
    """Index of the first true entry."""
    return int(np.argmax(bad)) if bad.any() else None


def checked_table(name: str, table: object, requests: int) -> _Array:
    """A block table `[B, pages]` as INT64, entries -1 or a block whose rows fit INT32."""
    is_empty_list = isinstance(table, Sequence) and not table  # of an empty batch: it has one dimension only
    array = np.zeros((0, 0), np.int64) if is_empty_list else _integers(name, table, 2)
    if len(array) != requests:
        raise MetadataError(name, f"{len(array)} rows", f"one row for each of {requests} requests")
    bad = (array < -1) | (array > MAX_BLOCK)
    if bad.any():
        raise MetadataError(_page_name(name, bad), int(array[bad][0]), f"-1 or a block id of at most {MAX_BLOCK}")
    return array


def _page_name(table_name: str, bad: _Array) -> str:
    """Request and logical page of the first true entry of `bad [B, pages]`."""
    request, page = np.argwhere(bad)[0]
    return f"{table_name}, request {request}, logical page {page}"


def check_live_pages(
    name: str, table: _Array, *, first_read: _Array, first_write: _Array, stop: _Array, active: _Array
) -> None:
    """Pages holding logical rows `[first_read, stop)` must exist; those of `[first_write, stop)` are one request's.

    `active [B]` are the requests that have rows in this step; nothing is asked of the others. Rows are counted in
    the table's own unit: source tokens of the window, stored rows of a compressed pool.
    """
    pages = table.shape[1]
    too_short = active & (-(-stop // BLOCK_ROWS) > pages)
    if (request := _first(too_short)) is not None:
        raise MetadataError(f"{name}, request {request}", f"{pages} pages",
                            f"{-(-int(stop[request]) // BLOCK_ROWS)} pages for {int(stop[request])} rows")  # fmt: skip
    page = np.arange(pages)
    touched = active[:, None] & (page * BLOCK_ROWS < stop[:, None])
    live = touched & ((page + 1) * BLOCK_ROWS > first_read[:, None])
    missing = live & (table < 0)
    if missing.any():
        raise MetadataError(_page_name(name, missing), -1, "a physical block under a live position")
    writes = active & (first_write < stop)
    written = touched & writes[:, None] & ((page + 1) * BLOCK_ROWS > first_write[:, None])
    _check_single_writer(name, table, live, written)


def _check_single_writer(name: str, table: _Array, live: _Array, written: _Array) -> None:
    """A block that one request writes must not be live in another, nor twice in one table."""
    blocks, counts = np.unique(table[live], return_counts=True)
    shared = written & np.isin(table, blocks[counts > 1])
    if shared.any():
        raise MetadataError(_page_name(name, shared), int(table[shared][0]),
                            "a block that no other live page uses, since this step writes it")  # fmt: skip


def check_state_blocks(source: int, table: object, query_lens: _Array) -> _Array:
    """A state table `[B, 1]` as INT32: -1 or a block of its own for each live request."""
    name = f"state_block_tables[{source}]"
    array = checked_table(name, table, len(query_lens))
    if len(query_lens) and array.shape[1] != 1:
        raise MetadataError(name, f"shape {array.shape}", f"[{len(query_lens)}, 1]")
    array = array.reshape(len(query_lens), 1)
    used = np.where(query_lens > 0, array[:, 0], -1)
    blocks, counts = np.unique(used[used >= 0], return_counts=True)
    if (request := _first(np.isin(used, blocks[counts > 1]))) is not None:
        raise MetadataError(f"{name}, request {request}", int(used[request]), "a block that no other live request uses")
    return np.ascontiguousarray(array, dtype=np.int32)
