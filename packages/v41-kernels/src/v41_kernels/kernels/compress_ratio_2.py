"""Latents of the pairs that close here, and the ring of each request's last tokens (model.md section 9)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.pooling import remember_last_tokens, write_latent

ROW_TILE = 1
COLUMN_TILE = 512
# Why: a pair is two rows that may lie in different tiles, or one of them in the ring, so a pair is a task of its own.
# Its four FP32 rows of 512 are 8 KB. All reads of the state come in the first loop, all writes in the second.


def make_entry(*, D: int, HEAD_DIM: int, eps: float) -> Callable[..., None]:
    """The entry for `D` channels and latents of `HEAD_DIM`."""

    def compress_ratio_2(
        x: pypto.Tensor([pypto.DYNAMIC, D], pypto.DT_BF16),
        compressor_wkv: pypto.Tensor([HEAD_DIM, D], pypto.DT_BF16),
        compressor_wgate: pypto.Tensor([HEAD_DIM, D], pypto.DT_BF16),
        compressor_norm: pypto.Tensor([HEAD_DIM], pypto.DT_BF16),
        query_start_loc: pypto.Tensor([pypto.DYNAMIC], pypto.DT_INT32),
        position_ids: pypto.Tensor([pypto.DYNAMIC], pypto.DT_INT32),
        token_to_req_indices: pypto.Tensor([pypto.DYNAMIC], pypto.DT_INT32),
        state_block_table: pypto.Tensor([pypto.DYNAMIC, 1], pypto.DT_INT32),
        state_cache: pypto.Tensor([pypto.DYNAMIC, 2 * HEAD_DIM], pypto.DT_FP32),
        compressor_source_token_indices: pypto.Tensor([pypto.DYNAMIC], pypto.DT_INT32),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        latent: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM], pypto.DT_BF16),
    ):
        for group in pypto.loop(compressor_source_token_indices.shape[0], name="GROUPS", idx_name="group"):
            token = compressor_source_token_indices[group]
            request = token_to_req_indices[token]
            block = pypto.max(state_block_table[request, 0], 0)
            write_latent(
                latent, group, x, compressor_wkv, compressor_wgate, compressor_norm, state_cache, block, token,
                position_ids[token], token == query_start_loc[request], D, HEAD_DIM, eps,
            )  # fmt: skip
        remember_last_tokens(
            state_cache, x, compressor_wkv, compressor_wgate, query_start_loc, position_ids, state_block_table,
            num_tokens[0], D, HEAD_DIM,
        )  # fmt: skip

    return compress_ratio_2
