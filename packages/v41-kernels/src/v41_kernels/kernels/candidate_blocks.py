"""The best blocks of each token by their best entry, the newest visible block among them (model.md section 11)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.candidates import choose_blocks

ROW_TILE = 1
COLUMN_TILE = 1024
# Why: rows of scores are as long as the context, so a token is a tile and its blocks are walked (`BLOCKS_TILE`).


def make_entry(
    *, ENTRIES: int, CANDIDATE_BLOCKS: int, candidate_topk_blocks: float, candidate_block_size: float
) -> Callable[..., None]:
    """The entry for rows of `ENTRIES` scores, none perhaps, in blocks of `candidate_block_size`."""
    K, size = int(candidate_topk_blocks), int(candidate_block_size)

    def candidate_blocks(
        scores: pypto.Tensor([pypto.DYNAMIC, max(ENTRIES, 1)], pypto.DT_BF16),
        compressed_lens: pypto.Tensor([pypto.DYNAMIC, 1], pypto.DT_INT32),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        kept_blocks: pypto.Tensor([pypto.DYNAMIC, max(CANDIDATE_BLOCKS, 1)], pypto.DT_INT8),
        block_scores: pypto.Tensor([pypto.DYNAMIC, max(CANDIDATE_BLOCKS, 1)], pypto.DT_BF16),
    ):
        for token in pypto.loop(num_tokens[0] * min(CANDIDATE_BLOCKS, 1), name="TOKENS", idx_name="token"):
            choose_blocks(
                scores, token, ENTRIES, compressed_lens, block_scores, token, kept_blocks, token, CANDIDATE_BLOCKS,
                K, size,
            )  # fmt: skip

    return candidate_blocks
