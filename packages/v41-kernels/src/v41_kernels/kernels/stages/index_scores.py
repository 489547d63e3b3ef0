"""Scores of index keys, read packed from their pages (model.md section 10)."""

from typing import Any

import pypto

from v41_kernels.kernels.stages.compensated import signed_row_sum
from v41_kernels.kernels.stages.linear import fp4_weight, product
from v41_kernels.kernels.stages.rows import row_tile

KEY_TILE = 64
BLOCK_ROWS = 128
# Why: 64 keys of 128 channels, decoded to BF16, are 16 KB, half a page; their products with 32 heads are 8 KB.


def score_keys(q: Any, weights: Any, token: Any, keys: Any, key_scale: Any, first: Any, IH: int, ID: int) -> Any:
    """BF16 `[1, KEY_TILE]`: scores of the packed keys in physical rows `first ...` for a token's heads.

    BF16 after the products, after the head weight and after the sum over heads.
    """
    pypto.set_vec_tile_shapes(IH, ID)
    heads = row_tile(q, IH, token * IH, IH, ID)
    even, odd = pypto.gathermask(heads, 1), pypto.gathermask(heads, 2)
    key_even, key_odd = fp4_weight(keys, key_scale, first, KEY_TILE, ID)
    of_even, of_odd = product(key_even, even), product(key_odd, odd)
    pypto.set_vec_tile_shapes(KEY_TILE, max(IH, 16))
    products = pypto.relu(pypto.cast(pypto.cast(of_even + of_odd, pypto.DT_BF16), pypto.DT_FP32))
    share = pypto.cast(row_tile(weights, 1, token, 1, IH), pypto.DT_FP32)
    weighted = pypto.cast(pypto.cast(products * share, pypto.DT_BF16), pypto.DT_FP32)
    total, lost = signed_row_sum(weighted, IH)
    scores = pypto.cast(total + lost, pypto.DT_BF16)
    pypto.set_vec_tile_shapes(KEY_TILE, KEY_TILE)
    return pypto.reshape(scores, [1, KEY_TILE])


def token_scores(
    q: Any, weights: Any, token: Any, keys: Any, key_scale: Any, table: Any, request: Any, length: Any,
    pages: int, IH: int, ID: int,
) -> Any:  # fmt: skip
    """Scores of a token's first `length` entries, BF16 `[1, max(pages, 1) * 128]`; `table` INT32 `[B, pages]`.

    Behind the last entry, up to a whole tile and at least one, stands whatever the page holds. A page that is not there
    (-1) has keys of zero. Without pages nothing is written.
    """
    scores = pypto.tensor([1, max(pages, 1) * BLOCK_ROWS], pypto.DT_BF16, "scores")
    if pages == 0:
        return scores
    # One tile at least: what is never written cannot be read, not even behind its last entry.
    tiles = pypto.max((length + KEY_TILE - 1) // KEY_TILE, 1)
    for tile in pypto.loop(tiles, name="KEYS", idx_name="key_tile"):
        block = table[request, tile // (BLOCK_ROWS // KEY_TILE)]
        column = tile * KEY_TILE
        if pypto.cond(block >= 0):
            first = block * BLOCK_ROWS + column % BLOCK_ROWS
            pypto.assemble(score_keys(q, weights, token, keys, key_scale, first, IH, ID), [0, column], scores)
        else:
            pypto.set_vec_tile_shapes(1, KEY_TILE)
            pypto.assemble(pypto.full([1, KEY_TILE], 0.0, pypto.DT_BF16), [0, column], scores)
    return scores
