"""One token's attention over chunks of rows, with a running maximum (model.md section 12, rule E4)."""

from typing import Any

import pypto

from v41_kernels.kernels.stages.linear import product

CHUNK = 64
"""Entries of the index list that share one update of the running maximum."""

_FIRST_MAXIMUM = -1.0e30
_MASKED = -3.0e38
_TINY = 1.0e-38


def begin(maximum: Any, denominator: Any, accumulator: Any, H: int, width: int) -> None:
    """The state before the first chunk, of tensors `[H, 1]`, `[H, 1]` and `[H, width]`."""
    pypto.set_vec_tile_shapes(H, min(width, 64))
    maximum[:] = pypto.full([H, 1], _FIRST_MAXIMUM, pypto.DT_FP32)
    denominator[:] = pypto.full([H, 1], 0.0, pypto.DT_FP32)
    accumulator[:] = pypto.full([H, width], 0.0, pypto.DT_FP32)


def attend_chunk(
    q: Any, rows: Any, live: Any, maximum: Any, denominator: Any, accumulator: Any,
    H: int, count: int, width: int, scale: float, entries: Any = None,
) -> None:  # fmt: skip
    """Takes `count` BF16 rows `[count, width]` into the state; `live` FP32 `[1, count]` is 0 where one is not to count.

    In a ragged tile the first `entries` rows are valid. Rows that do not count are replaced by zeros, since their bytes
    may decode to NaN.
    """
    pypto.set_vec_tile_shapes(count, min(width, 128))
    entries = count if entries is None else entries
    column = pypto.reshape(live, [count, 1], valid_shape=[entries, 1])
    live_rows = pypto.expand_clone(column, [count, width], valid_shape=[entries, width])
    values = pypto.where(pypto.gt(live_rows, 0.5), rows, 0.0)
    scores = product(q, values)
    pypto.set_vec_tile_shapes(H, count)
    counted = pypto.gt(pypto.expand_clone(live, [H, count], valid_shape=[H, entries]), 0.5)
    scores = pypto.where(counted, scores * scale, _MASKED)
    newest = pypto.maximum(maximum, pypto.amax(scores, -1, keepdim=True))
    decay = pypto.exp(maximum - newest)
    p = pypto.exp(scores - newest)
    pypto.set_cube_tile_shapes([16, 16], [64, 64], [64, 64])
    weighted = pypto.matmul(pypto.cast(p, pypto.DT_BF16), values, pypto.DT_FP32)
    denominator[:] = denominator * decay + pypto.sum(p, -1, keepdim=True)
    pypto.set_vec_tile_shapes(H, min(width, 64))
    accumulator[:] = accumulator * decay + weighted
    maximum[:] = newest


def attended(maximum: Any, denominator: Any, accumulator: Any, sink: Any, H: int, width: int) -> Any:
    """BF16 `[H, width]`: the quotient, with the sink `[H, 1]` in the denominator; zero where nothing counted."""
    pypto.set_vec_tile_shapes(H, min(width, 64))
    total = denominator + pypto.exp(sink - maximum)  # infinite after no live entry, so that the quotient is zero
    return pypto.cast(accumulator / pypto.maximum(total, _TINY), pypto.DT_BF16)
