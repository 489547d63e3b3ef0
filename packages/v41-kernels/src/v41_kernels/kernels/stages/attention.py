"""Attention of one token's heads over a list of entries, chunk by chunk (model.md section 12).

The running softmax of a token is a maximum and a denominator `[H, 1]` and an accumulator `[H, W]`, all FP32.
"""

from typing import Any

import pypto

HEAD_TILE = 16
CHUNK = 64
# Why: 64 entries share one update of the running maximum, as the model's arithmetic has it, and 16 heads fill a cube
# core's rows. 16 x 64 scores and 16 x 128 channels of an accumulator are 4 and 8 KB in FP32.
_CHANNEL_TILE = 128
_LOWEST = -1e30  # the maximum before the first entry; finite, so that an empty row meets no inf - inf
_NO_SCORE = -3e38  # an entry that does not count: its exponential is 0 beside every maximum


def running_softmax(H: int, W: int) -> tuple[Any, Any, Any]:
    """Maximum, denominator and accumulator before the first entry."""
    maximum = pypto.tensor([H, 1], pypto.DT_FP32, "maximum")
    denominator = pypto.tensor([H, 1], pypto.DT_FP32, "denominator")
    accumulator = pypto.tensor([H, W], pypto.DT_FP32, "accumulator")
    pypto.set_vec_tile_shapes(HEAD_TILE, _CHANNEL_TILE)
    maximum[:] = pypto.full([H, 1], _LOWEST, pypto.DT_FP32)
    denominator[:] = pypto.full([H, 1], 0.0, pypto.DT_FP32)
    accumulator[:] = pypto.full([H, W], 0.0, pypto.DT_FP32)
    return maximum, denominator, accumulator


def attend(softmax: tuple[Any, Any, Any], q: Any, kv: Any, live: Any, entries: Any, H: int, W: int) -> None:
    """Adds a chunk: `entries` rows of BF16 `kv` `[CHUNK, W]` to queries BF16 `[H, W]`.

    FP32 `live` `[1, CHUNK]` is 1 where an entry counts; one that does not may hold anything. Probabilities are BF16 in
    the product, not in the denominator.
    """
    maximum, denominator, accumulator = softmax
    values = live_rows(kv, live, entries, W)
    # Why: a cube core's L0A and L0B hold 64 KB each; 16 x 64 and 64 x 64 BF16 are 2 and 8 KB, twice buffered.
    pypto.set_cube_tile_shapes([16, 16], [64, 64], [64, 64])
    products = pypto.matmul(q, values, pypto.DT_FP32, b_trans=True)
    pypto.set_vec_tile_shapes(HEAD_TILE, CHUNK)
    counted = pypto.gt(pypto.expand_clone(live, [H, CHUNK], valid_shape=[H, entries]), 0.5)
    scores = pypto.where(counted, products * W**-0.5, _NO_SCORE)
    newest = pypto.maximum(maximum, pypto.amax(scores, -1, keepdim=True))
    decay = pypto.exp(maximum - newest)
    p = pypto.exp(scores - newest)
    weighted = pypto.matmul(pypto.cast(p, pypto.DT_BF16), values, pypto.DT_FP32)
    denominator[:] = denominator * decay + pypto.sum(p, -1, keepdim=True)
    pypto.set_vec_tile_shapes(HEAD_TILE, _CHANNEL_TILE)
    accumulator[:] = accumulator * decay + weighted
    maximum[:] = newest + 0.0


def attended(softmax: tuple[Any, Any, Any], sink: Any) -> Any:
    """BF16 `[H, W]`; the sink `[H, 1]` joins the denominator. A token without an entry gets zeros."""
    maximum, denominator, accumulator = softmax
    pypto.set_vec_tile_shapes(HEAD_TILE, _CHANNEL_TILE)
    total = denominator + pypto.exp(sink - maximum)
    result = pypto.where(pypto.gt(maximum, 0.5 * _LOWEST), accumulator / total, 0.0)
    return pypto.cast(result, pypto.DT_BF16)


def live_rows(kv: Any, live: Any, entries: Any, W: int) -> Any:
    """BF16 `[CHUNK, W]`: `kv` with zeros instead of the rows that do not count."""
    pypto.set_vec_tile_shapes(CHUNK, CHUNK)
    column = pypto.reshape(live, [CHUNK, 1], valid_shape=[entries, 1])
    pypto.set_vec_tile_shapes(CHUNK, _CHANNEL_TILE)
    return pypto.cast(pypto.where(pypto.gt(column, 0.5), pypto.cast(kv, pypto.DT_FP32), 0.0), pypto.DT_BF16)
