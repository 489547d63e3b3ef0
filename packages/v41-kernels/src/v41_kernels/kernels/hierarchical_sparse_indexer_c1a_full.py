"""Score the visible index keys, choose candidate blocks, publish the best of each token (model.md sections 10, 11)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.candidates import choose_blocks
from v41_kernels.kernels.stages.index_scores import BLOCK_ROWS, token_scores
from v41_kernels.kernels.stages.selected_rows import write_best_rows

ROW_TILE = 1
COLUMN_TILE = 64
# Why: every token sees a number of keys of its own, so a tile is one token against 64 keys (`KEY_TILE`). Its BF16
# scores are all that is kept: two bytes an entry, so that the least of score budgets holds them.


def make_entry(
    *,
    INDEX_HEADS: int,
    INDEX_DIM: int,
    INDEX_TOPK: int,
    PAGES: int,
    CANDIDATE_BLOCKS: int,
    candidate_block_size: float,
    candidate_topk_blocks: float,
) -> Callable[..., None]:
    """The entry for block tables of `PAGES` columns, none perhaps and masks of `CANDIDATE_BLOCKS`."""
    size, kept_count = int(candidate_block_size), int(candidate_topk_blocks)

    def hierarchical_sparse_indexer_c1a_full(
        index_q: pypto.Tensor([pypto.DYNAMIC, INDEX_DIM], pypto.DT_BF16),
        index_weights: pypto.Tensor([pypto.DYNAMIC, INDEX_HEADS], pypto.DT_BF16),
        index_key: pypto.Tensor([pypto.DYNAMIC, INDEX_DIM // 2], pypto.DT_INT8),
        index_key_scale: pypto.Tensor([pypto.DYNAMIC, INDEX_DIM // 32], pypto.DT_INT8),
        compressed_block_table: pypto.Tensor([pypto.DYNAMIC, max(PAGES, 1)], pypto.DT_INT32),
        compressed_lens: pypto.Tensor([pypto.DYNAMIC, 1], pypto.DT_INT32),
        token_to_req_indices: pypto.Tensor([pypto.DYNAMIC], pypto.DT_INT32),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        kept_blocks: pypto.Tensor([pypto.DYNAMIC, max(CANDIDATE_BLOCKS, 1)], pypto.DT_INT8),
        topk_rows: pypto.Tensor([pypto.DYNAMIC, INDEX_TOPK], pypto.DT_INT32),
    ):
        capacity = max(PAGES, 1) * BLOCK_ROWS
        for token in pypto.loop(num_tokens[0], name="TOKENS", idx_name="token"):
            request = token_to_req_indices[token]
            length = compressed_lens[token, 0]
            scores = token_scores(
                index_q, index_weights, token, index_key, index_key_scale, compressed_block_table, request, length,
                PAGES, INDEX_HEADS, INDEX_DIM,
            )  # fmt: skip
            if CANDIDATE_BLOCKS > 0:
                block_scores = pypto.tensor([1, CANDIDATE_BLOCKS], pypto.DT_BF16, "block_scores")
                choose_blocks(
                    scores, 0, length, compressed_lens, block_scores, 0, kept_blocks, token, CANDIDATE_BLOCKS,
                    kept_count, size,
                )  # fmt: skip
            write_best_rows(scores, length, compressed_block_table, request, topk_rows, token, INDEX_TOPK, capacity)

    return hierarchical_sparse_indexer_c1a_full
