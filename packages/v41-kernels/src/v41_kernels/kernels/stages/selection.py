"""The best `K` of a row that is walked in chunks, equal scores by position (model.md section 3).

A first walk keeps the `K` best scores, whose last is the cutoff; a second one takes what lies above it and, from the
left, as many equal to it as there is room for. No chunk depends on the length of the row, and no order that a device
gives equal scores matters.
"""

from typing import Any

import pypto

from v41_kernels.kernels.stages.tile_shapes import tile_columns

NOTHING = float("-inf")


def best_scores(best: Any, scores: Any, K: int, C: int) -> Any:
    """FP32 `[1, K]`: the best of FP32 `best` `[1, K]` and `scores` `[1, C]`, in descending order."""
    pypto.set_vec_tile_shapes(1, tile_columns(K + C, K + C + 16))
    together = pypto.concat([best, scores], -1)
    values, _ = pypto.topk(together, K, -1, True)
    return values


def cutoff(best: Any, K: int) -> tuple[Any, Any]:
    """The `K`-th best score `[1, 1]`, and how many entries equal to it are taken `[1, 1]`."""
    pypto.set_vec_tile_shapes(1, tile_columns(K, K + 16))
    last = pypto.amin(best, -1, keepdim=True)
    above = pypto.sum(pypto.where(pypto.gt(best, last), 1.0, 0.0), -1, keepdim=True)
    return last, above * (-1.0) + float(K)


def taken(scores: Any, last: Any, room: Any, seen: Any, C: int) -> tuple[Any, Any]:
    """FP32 `[1, C]`, 1 for entries that are taken, and how many equal to the cutoff are `seen` so far `[1, 1]`.

    An entry of -inf is never taken.
    """
    pypto.set_vec_tile_shapes(1, tile_columns(C, C + 16))
    equal = pypto.where(pypto.eq(scores, last), 1.0, 0.0)
    rank = pypto.cumsum(equal, -1) + seen
    fits = pypto.where(pypto.le(rank, room), equal, 0.0)
    chosen = pypto.where(pypto.gt(scores, last), 1.0, fits)
    chosen = pypto.where(pypto.gt(scores, NOTHING), chosen, 0.0)
    return chosen, seen + pypto.sum(equal, -1, keepdim=True)
