"""One token's attention over chunks of rows, with a running maximum (model.md section 12, rule E4)."""

from collections.abc import Sequence
from typing import Any

import pypto

from v41_kernels.kernels.stages.linear import product

CHUNK = 64
"""Entries of the index list that share one update of the running maximum."""

_FIRST_MAXIMUM = -1.0e30
_MASKED = -3.0e38
_TINY = 1.0e-38


def begun(H: int, width: int) -> tuple[Any, Any, Any]:
    """The state before the first chunk: maximum and denominator FP32 `[H, 1]`, accumulator `[H, width]`."""
    maximum = pypto.tensor([H, 1], pypto.DT_FP32, "maximum")
    denominator = pypto.tensor([H, 1], pypto.DT_FP32, "denominator")
    accumulator = pypto.tensor([H, width], pypto.DT_FP32, "accumulator")
    for _once in pypto.loop(1, name="BEGIN", idx_name="once"):
        pypto.set_vec_tile_shapes(H, min(width, 64))
        maximum[:] = pypto.full([H, 1], _FIRST_MAXIMUM, pypto.DT_FP32)
        denominator[:] = pypto.full([H, 1], 0.0, pypto.DT_FP32)
        accumulator[:] = pypto.full([H, width], 0.0, pypto.DT_FP32)
    return maximum, denominator, accumulator


def attend_chunk(
    q: Any, rows: Any, live: Any, state: Sequence[Any], H: int, count: int, width: int, entries: Any = None
) -> None:  # fmt: skip
    """Takes `count` BF16 rows `[count, width]` into the state; `live` FP32 `[1, count]` is 0 where one is not to count.

    In a ragged tile the first `entries` rows are valid. Rows that do not count are replaced by zeros, since their bytes
    may decode to NaN.
    """
    maximum, denominator, accumulator = state
    pypto.set_vec_tile_shapes(count, min(width, 128))
    entries = count if entries is None else entries
    column = pypto.reshape(live, [count, 1], valid_shape=[entries, 1])
    live_rows = pypto.expand_clone(column, [count, width], valid_shape=[entries, width])
    values = pypto.where(pypto.gt(live_rows, 0.5), rows, 0.0)
    scores = product(q, values)
    pypto.set_vec_tile_shapes(H, count)
    counted = pypto.gt(pypto.expand_clone(live, [H, count], valid_shape=[H, entries]), 0.5)
    scores = pypto.where(counted, scores * width**-0.5, _MASKED)
    newest = pypto.maximum(maximum, pypto.amax(scores, -1, keepdim=True))
    decay = pypto.exp(maximum - newest)
    p = pypto.exp(scores - newest)
    pypto.set_cube_tile_shapes([16, 16], [64, 64], [64, 64])
    weighted = pypto.matmul(pypto.cast(p, pypto.DT_BF16), values, pypto.DT_FP32)
    denominator[:] = denominator * decay + pypto.sum(p, -1, keepdim=True)
    pypto.set_vec_tile_shapes(H, min(width, 64))
    accumulator[:] = accumulator * decay + weighted
    maximum[:] = newest


def write_attended(state: Sequence[Any], attn_sink: Any, o: Any, token: Any, H: int, width: int) -> None:
    """BF16 rows of a token's heads: the quotients, with sinks `[H]` in the denominator; zero where nothing counted."""
    maximum, denominator, accumulator = state
    for _once in pypto.loop(1, name="END", idx_name="once"):
        pypto.set_vec_tile_shapes(H, min(width, 64))
        sink = pypto.reshape(attn_sink, [H, 1])
        total = denominator + pypto.exp(sink - maximum)  # infinite after no live entry, so that the quotient is zero
        result = pypto.cast(accumulator / pypto.maximum(total, _TINY), pypto.DT_BF16)
        pypto.assemble(result, [token * H, 0], o)
