"""What a batch must satisfy before it is lowered: each check names request, table and logical page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from v41_config.cache_abi import BLOCK_ROWS
from v41_config.errors import MetadataError
from v41_config.model_config import ModelConfig

_Array = npt.NDArray[Any]

MAX_BLOCK = (2**31 - 1) // BLOCK_ROWS
"""Largest physical block whose last row is still an INT32."""


def _integers(name: str, values: object, ndim: int) -> _Array:
    """`values` as an INT64 array of `ndim` dimensions; bool, float and ragged input are refused."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise MetadataError(name, values, f"a rectangular array of {ndim} dimensions") from None
    if array.size == 0 and array.dtype == np.float64:
        array = array.astype(np.int64)  # an empty list has no integer dtype of its own
    if array.ndim != ndim or array.dtype.kind not in "iu":
        raise MetadataError(name, f"{array.dtype} of shape {array.shape}", f"integers of {ndim} dimensions")
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
    for name, bad, values, rule in (
        ("query_start_loc", np.diff(starts, prepend=0) < 0, starts, "nondecreasing starts"),
        ("kv_seq_lens", stored < 0, stored, "a length of at least 0"),
        ("kv_seq_lens", stored + np.diff(starts) > config.max_position_embeddings, stored + np.diff(starts),
         f"at most max_position_embeddings = {config.max_position_embeddings} after this step"),
    ):  # fmt: skip
        if bad.any():
            where = int(np.argmax(bad))
            raise MetadataError(f"{name}[{where}]", int(values[where]), rule)
    return starts, stored


def checked_table(name: str, table: object, requests: int) -> _Array:
    """A block table `[B, pages]` as INT64, entries -1 or a block whose rows fit INT32."""
    array = _integers(name, table, 2) if requests or np.size(np.asarray(table)) else np.zeros((0, 0), np.int64)
    if len(array) != requests:
        raise MetadataError(name, f"{len(array)} rows", f"one row for each of {requests} requests")
    bad = (array < -1) | (array > MAX_BLOCK)
    if bad.any():
        request, page = np.unravel_index(int(np.argmax(bad)), array.shape)
        raise MetadataError(f"{name}, request {request}, logical page {page}", int(array[request, page]),
                            f"-1 or a block id of at most {MAX_BLOCK}")  # fmt: skip
    return array


def check_live_pages(
    name: str, table: _Array, first_read: _Array, first_write: _Array, stop: _Array, active: _Array
) -> None:
    """Pages holding logical rows `[first_read, stop)` must exist; pages from `first_write` on have one request each.

    All rows are in the table's own unit: source tokens of the window, stored rows of a compressed pool.
    """
    pages = table.shape[1]
    too_short = active & (-(-stop // BLOCK_ROWS) > pages)
    if too_short.any():
        request = int(np.argmax(too_short))
        raise MetadataError(f"{name}, request {request}", f"{pages} pages",
                            f"{-(-int(stop[request]) // BLOCK_ROWS)} pages for {int(stop[request])} rows")  # fmt: skip
    page = np.arange(pages)
    touched = active[:, None] & (page * BLOCK_ROWS < stop[:, None])
    live = touched & ((page + 1) * BLOCK_ROWS > first_read[:, None])
    missing = live & (table < 0)
    if missing.any():
        request, where = np.unravel_index(int(np.argmax(missing)), table.shape)
        raise MetadataError(f"{name}, request {request}, logical page {where}", -1, "a physical block under a live position")
    written = touched & ((page + 1) * BLOCK_ROWS > first_write[:, None])
    _check_single_writer(name, table, live, written)


def _check_single_writer(name: str, table: _Array, live: _Array, written: _Array) -> None:
    """A block that one request writes must not be live in another, nor twice in one table."""
    blocks, counts = np.unique(table[live], return_counts=True)
    shared = written & np.isin(table, blocks[counts > 1])
    if shared.any():
        request, page = np.unravel_index(int(np.argmax(shared)), table.shape)
        raise MetadataError(f"{name}, request {request}, logical page {page}", int(table[request, page]),
                            "a block that no other live page uses, since this step writes it")  # fmt: skip


def check_state_blocks(source: int, table: object, query_lens: _Array) -> _Array:
    """A state table `[B, 1]` as INT32: -1 or a block of its own for each live request."""
    name = f"state_block_tables[{source}]"
    array = checked_table(name, table, len(query_lens))
    if array.size and array.shape[1] != 1:
        raise MetadataError(name, f"shape {array.shape}", f"[{len(query_lens)}, 1]")
    array = array.reshape(len(query_lens), 1)
    used = np.where(query_lens > 0, array[:, 0], -1)
    blocks, counts = np.unique(used[used >= 0], return_counts=True)
    shared = np.isin(used, blocks[counts > 1])
    if shared.any():
        request = int(np.argmax(shared))
        raise MetadataError(f"{name}, request {request}", int(used[request]), "a block that no other live request uses")
    return np.ascontiguousarray(array, dtype=np.int32)
