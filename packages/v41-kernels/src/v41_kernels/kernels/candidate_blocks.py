"""The best blocks of each token by their best entry, the newest visible block among them (model.md section 11)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable
from typing import Any

import pypto

from v41_kernels.kernels.stages.rows import column_indices, row_tile
from v41_kernels.kernels.stages.selection import NOTHING, best_scores, cutoff, taken
from v41_kernels.kernels.stages.tile_shapes import tile_columns

ROW_TILE = 1
COLUMN_TILE = 1024
# Why: 1,024 blocks beside the 2,048 best so far are a row of 12 KB for the sorter, and a running count over more than
# 1,024 columns is refused by the compiler. Rows of scores are as long as the context, so a token is a tile.


def block_scores_of(scores: Any, token: Any, first: Any, entries: Any, C: int, size: int) -> Any:
    """FP32 `[1, C]`: the best entry of each block from entry `first` on; -inf behind the last entry."""
    pypto.set_vec_tile_shapes(ROW_TILE, C * size)
    cut = pypto.view(scores, [1, C * size], [token, first], valid_shape=[1, entries])
    filled = pypto.fillpad(pypto.cast(cut, pypto.DT_FP32), "constant", NOTHING)
    blocks = pypto.reshape(filled, [C, size])
    pypto.set_vec_tile_shapes(min(C, 128), max(size, 16))
    best = pypto.amax(blocks, -1, keepdim=True)
    pypto.set_vec_tile_shapes(ROW_TILE, C)
    return pypto.reshape(best, [1, C])


def with_newest_block(blocks: Any, length: Any, base: Any, C: int, size: int) -> Any:
    """`blocks` from block `base` `[1, 1]` on, +inf where the newest of `length` `[1, 1]` entries stands."""
    numbers = column_indices(C)
    pypto.set_vec_tile_shapes(ROW_TILE, C)
    newest = pypto.floor((length - 1.0) * (1.0 / size)) - base
    return pypto.where(pypto.eq(numbers, newest), float("inf"), blocks)


def make_entry(
    *, ENTRIES: int, CANDIDATE_BLOCKS: int, candidate_topk_blocks: int, candidate_block_size: int
) -> Callable[..., None]:
    """The entry for rows of `ENTRIES` scores in blocks of `candidate_block_size`."""
    K, size = int(candidate_topk_blocks), int(candidate_block_size)
    C = min(-(-CANDIDATE_BLOCKS // 16) * 16, COLUMN_TILE)

    def candidate_blocks(
        scores: pypto.Tensor([pypto.DYNAMIC, ENTRIES], pypto.DT_BF16),
        compressed_lens: pypto.Tensor([pypto.DYNAMIC, 1], pypto.DT_INT32),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        kept_blocks: pypto.Tensor([pypto.DYNAMIC, CANDIDATE_BLOCKS], pypto.DT_INT8),
        block_scores: pypto.Tensor([pypto.DYNAMIC, CANDIDATE_BLOCKS], pypto.DT_BF16),
    ):
        chunks = (CANDIDATE_BLOCKS + C - 1) // C
        for token in pypto.loop(num_tokens[0], name="TOKENS", idx_name="token"):
            best = pypto.tensor([1, K], pypto.DT_FP32, "best")
            base = pypto.tensor([1, 1], pypto.DT_FP32, "base")
            seen = pypto.tensor([1, 1], pypto.DT_FP32, "seen")
            pypto.set_vec_tile_shapes(ROW_TILE, tile_columns(K, K + 16))
            best[:] = pypto.full([1, K], NOTHING, pypto.DT_FP32)
            base[:] = pypto.full([1, 1], 0.0, pypto.DT_FP32)
            seen[:] = pypto.full([1, 1], 0.0, pypto.DT_FP32)
            for chunk in pypto.loop(chunks, name="SCORES", idx_name="chunk"):
                first = chunk * C
                entries = pypto.min(ENTRIES - first * size, C * size)
                blocks = block_scores_of(scores, token, first * size, entries, C, size)
                length = pypto.cast(row_tile(compressed_lens, 1, token, 1, 1), pypto.DT_FP32)
                blocks = with_newest_block(blocks, length, base, C, size)
                count = pypto.min(CANDIDATE_BLOCKS - first, C)
                shown = pypto.view(pypto.cast(blocks, pypto.DT_BF16), [1, C], [0, 0], valid_shape=[1, count])
                pypto.assemble(pypto.clone(shown), [token, first], block_scores)
                best[:] = best_scores(best, blocks, K, C)
                base[:] = base + float(C)
            for chunk in pypto.loop(chunks, name="CHOICE", idx_name="choice"):
                first = chunk * C
                count = pypto.min(CANDIDATE_BLOCKS - first, C)
                last, room = cutoff(best, K)
                pypto.set_vec_tile_shapes(ROW_TILE, C)
                shown = pypto.view(block_scores, [1, C], [token, first], valid_shape=[1, count])
                blocks = pypto.fillpad(pypto.cast(shown, pypto.DT_FP32), "constant", NOTHING)
                chosen, equal = taken(blocks, last, room, seen, C)
                mask = pypto.view(pypto.cast(chosen, pypto.DT_FP16), [1, C], [0, 0], valid_shape=[1, count])
                pypto.assemble(pypto.cast(mask, pypto.DT_INT8), [token, first], kept_blocks)
                seen[:] = equal

    return candidate_blocks
