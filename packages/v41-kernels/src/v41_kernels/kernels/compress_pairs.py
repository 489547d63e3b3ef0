"""Latents of pairs, each at the token that closes it, and the ring of last tokens (model.md section 9)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.pooling import remember_last_tokens, write_latent

ROW_TILE = 1
COLUMN_TILE = 512
# Why: as in `compress_ratio_2`, of which this is the form inside an attention: which tokens close a pair follows from
# their positions, and rows of other tokens are left as they are.


def make_entry(*, D: int, HEAD_DIM: int, eps: float) -> Callable[..., None]:
    """The entry for `D` channels and latents of `HEAD_DIM`."""

    def compress_pairs(
        x: pypto.Tensor([pypto.DYNAMIC, D], pypto.DT_BF16),
        compressor_wkv: pypto.Tensor([HEAD_DIM, D], pypto.DT_BF16),
        compressor_wgate: pypto.Tensor([HEAD_DIM, D], pypto.DT_BF16),
        compressor_norm: pypto.Tensor([HEAD_DIM], pypto.DT_BF16),
        query_start_loc: pypto.Tensor([pypto.DYNAMIC], pypto.DT_INT32),
        position_ids: pypto.Tensor([pypto.DYNAMIC], pypto.DT_INT32),
        token_to_req_indices: pypto.Tensor([pypto.DYNAMIC], pypto.DT_INT32),
        state_block_table: pypto.Tensor([pypto.DYNAMIC, 1], pypto.DT_INT32),
        state_cache: pypto.Tensor([pypto.DYNAMIC, 2 * HEAD_DIM], pypto.DT_FP32),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        latent: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM], pypto.DT_BF16),
    ):
        for token in pypto.loop(num_tokens[0], name="TOKENS", idx_name="token"):
            if position_ids[token] % 2 == 1:
                request = token_to_req_indices[token]
                block = pypto.max(state_block_table[request, 0], 0)
                write_latent(
                    latent, token, x, compressor_wkv, compressor_wgate, compressor_norm, state_cache, block, token,
                    position_ids[token], token == query_start_loc[request], D, HEAD_DIM, eps,
                )  # fmt: skip
        remember_last_tokens(
            state_cache, x, compressor_wkv, compressor_wgate, query_start_loc, position_ids, state_block_table,
            num_tokens[0], D, HEAD_DIM,
        )  # fmt: skip

    return compress_pairs
