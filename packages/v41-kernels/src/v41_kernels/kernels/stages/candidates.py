"""The best blocks of a row of scores (model.md section 11)."""

from typing import Any

import pypto

from v41_kernels.kernels.stages.rows import column_indices, row_tile
from v41_kernels.kernels.stages.selection import NOTHING, best_scores, cutoff, taken
from v41_kernels.kernels.stages.tile_shapes import tile_columns

BLOCKS_TILE = 1024
# Why: 1,024 blocks beside the 2,048 best so far are a row of 12 KB for the sorter, and a running count over more than
# 1,024 columns is refused by the compiler.


def block_maxima(scores: Any, row: Any, first: Any, entries: Any, C: int, size: int) -> Any:
    """FP32 `[1, C]`: the best of each block of `size` of `entries` BF16 scores; -inf where there is none."""
    pypto.set_vec_tile_shapes(1, tile_columns(C * size, C * size + 16))
    cut = pypto.view(scores, [1, C * size], [row, first], valid_shape=[1, entries])
    blocks = pypto.reshape(pypto.fillpad(pypto.cast(cut, pypto.DT_FP32), "constant", NOTHING), [C, size])
    pypto.set_vec_tile_shapes(min(C, 128), max(size, 16))
    best = pypto.amax(blocks, -1, keepdim=True)
    pypto.set_vec_tile_shapes(1, tile_columns(C, BLOCKS_TILE))
    return pypto.reshape(best, [1, C])


def with_newest_block(blocks: Any, length: Any, base: Any, C: int, size: int) -> Any:
    """`blocks` from block `base` `[1, 1]` on, +inf where the newest of `length` `[1, 1]` entries stands."""
    numbers = column_indices(C)
    pypto.set_vec_tile_shapes(1, tile_columns(C, BLOCKS_TILE))
    newest = pypto.floor((length - 1.0) * (1.0 / size)) - base
    return pypto.where(pypto.eq(numbers, newest), float("inf"), blocks)


def clipped(tile: Any, count: Any, C: int) -> Any:
    """The first `count` columns of a tile `[1, C]`."""
    return pypto.clone(pypto.view(tile, [1, C], [0, 0], valid_shape=[1, count]))


def choose_blocks(
    scores: Any,
    row: Any,
    entries: Any,
    lens: Any,
    block_scores: Any,
    block_row: Any,
    kept_blocks: Any,
    token: Any,
    blocks: int,
    K: int,
    size: int,
) -> None:
    """Writes which of a token's `blocks` are kept; their scores go through row `block_row` of BF16 `block_scores`.

    `scores` BF16 has the token's scores in row `row`, of which the first `entries` may be other than -inf; `lens`
    INT32 `[T, 1]` says how many the token sees.
    """
    C = max(min(blocks, BLOCKS_TILE), 1)
    ragged = blocks % C > 0  # one chunk, or whole chunks, are static tiles, which the passes keep
    best = pypto.tensor([1, K], pypto.DT_FP32, "best_blocks")
    base = pypto.tensor([1, 1], pypto.DT_FP32, "base_block")
    seen = pypto.tensor([1, 1], pypto.DT_FP32, "equal_blocks")
    pypto.set_vec_tile_shapes(1, tile_columns(K, K + 16))
    best[:] = pypto.full([1, K], NOTHING, pypto.DT_FP32)
    base[:] = pypto.full([1, 1], 0.0, pypto.DT_FP32)
    seen[:] = pypto.full([1, 1], 0.0, pypto.DT_FP32)
    for chunk in pypto.loop((blocks + C - 1) // C, name="BLOCK_SCORES", idx_name="block_chunk"):
        first = chunk * C
        live = pypto.max(pypto.min(entries - first * size, C * size), 0)
        maxima = block_maxima(scores, row, first * size, live, C, size)
        length = pypto.cast(row_tile(lens, 1, token, 1, 1), pypto.DT_FP32)
        maxima = with_newest_block(maxima, length, base, C, size)
        shown = pypto.cast(maxima, pypto.DT_BF16)
        if ragged:
            shown = clipped(shown, pypto.min(blocks - first, C), C)
        pypto.assemble(shown, [block_row, first], block_scores)
        best[:] = best_scores(best, maxima, K, C)
        base[:] = base + float(C)
    for chunk in pypto.loop((blocks + C - 1) // C, name="BLOCK_CHOICE", idx_name="choice_chunk"):
        first = chunk * C
        count = pypto.min(blocks - first, C) if ragged else C
        last, room = cutoff(best, K)
        pypto.set_vec_tile_shapes(1, tile_columns(C, BLOCKS_TILE))
        shown = pypto.view(block_scores, [1, C], [block_row, first], valid_shape=[1, count])
        shown = pypto.cast(shown, pypto.DT_FP32)
        if ragged:
            shown = pypto.fillpad(shown, "constant", NOTHING)
        chosen, equal = taken(shown, last, room, seen, C)
        mask = pypto.cast(chosen, pypto.DT_FP16)
        if ragged:
            mask = clipped(mask, count, C)
        pypto.assemble(pypto.cast(mask, pypto.DT_INT8), [token, first], kept_blocks)
        seen[:] = equal
