"""What a step's lengths must satisfy before it is lowered; each check names the request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from v41_config.config_bounds import INT32_MAX
from v41_config.errors import MetadataError
from v41_config.model_config import ModelConfig

_Array = npt.NDArray[Any]


def checked_integers(name: str, values: object, ndim: int) -> _Array:
    """`values` as an array of `ndim` dimensions of integers that INT64 holds.

    Bool, float, unsigned 64-bit and ragged input are refused.
    """
    try:
        array = np.asarray(values)
    except ValueError:
        raise MetadataError(name, values, f"a rectangular array of {ndim} dimensions") from None
    if array.size == 0 and array.dtype == np.float64:
        array = array.astype(np.int64)  # an empty list has no integer dtype of its own
    if array.ndim != ndim or array.dtype.kind not in "iu" or not np.can_cast(array.dtype, np.int64):
        raise MetadataError(name, f"{array.dtype} of shape {array.shape}", f"INT64 values of {ndim} dimensions")
    return array


def first_true(flags: _Array) -> int | None:
    """Index of the first true entry."""
    return int(flags.argmax()) if flags.any() else None


def checked_lengths(
    config: ModelConfig, query_start_loc: Sequence[int] | _Array, kv_seq_lens: Sequence[int] | _Array
) -> tuple[_Array, _Array]:
    """`(query_start_loc [B+1], kv_seq_lens [B])` as INT64."""
    stored = checked_integers("kv_seq_lens", kv_seq_lens, 1).astype(np.int64)
    starts = _checked_start_loc("query_start_loc", query_start_loc, len(stored), "requests", "request")
    if (request := first_true(stored < 0)) is not None:
        raise MetadataError(f"kv_seq_lens, request {request}", int(stored[request]), "a length of at least 0")
    query_lens = np.diff(starts)
    limit = config.max_position_embeddings
    if (request := first_true(stored > limit - query_lens)) is not None:  # their sum could overflow
        raise MetadataError(f"kv_seq_lens, request {request}",
                            f"{stored[request]} stored and {query_lens[request]} new tokens",
                            f"at most max_position_embeddings = {limit} tokens together")  # fmt: skip
    if starts[-1] > INT32_MAX:
        raise MetadataError("query_start_loc", int(starts[-1]), f"at most {INT32_MAX} packed rows")
    return starts, stored


def checked_dp_groups(dp_group_start_loc: Sequence[int] | _Array | None, requests: int) -> _Array:
    """`dp_group_start_loc [groups+1]` as INT64; one group where there is none."""
    if dp_group_start_loc is None:
        return np.array([0, requests])
    starts = _checked_start_loc("dp_group_start_loc", dp_group_start_loc, None, "groups", "group")
    if starts[-1] != requests:
        raise MetadataError("dp_group_start_loc[-1]", int(starts[-1]), f"{requests}, the number of requests")
    return starts


def _checked_start_loc(name: str, values: object, count: int | None, items: str, item: str) -> _Array:
    """Boundaries of `count` runs of neighbours (of one at least), as INT64: from 0, nondecreasing."""
    starts = checked_integers(name, values, 1).astype(np.int64)
    if count is None and len(starts) < 2:
        raise MetadataError(name, f"{len(starts)} entries", f"at least 2, one more than {items}")
    if count is not None and len(starts) != count + 1:
        raise MetadataError(name, f"{len(starts)} entries", f"{count + 1}, one more than {items}")
    if starts[0] != 0:
        raise MetadataError(f"{name}[0]", int(starts[0]), "0")
    if (run := first_true(starts[1:] < starts[:-1])) is not None:
        raise MetadataError(f"{name}, {item} {run}", starts[run : run + 2].tolist(), "nondecreasing starts")
    return starts
