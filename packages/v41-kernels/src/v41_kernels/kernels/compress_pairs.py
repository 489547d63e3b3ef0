"""Latents of pairs, each at the token that closes it, and the ring of last tokens (model.md section 9)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.pooling import RING, pooled, projected_row

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
                if token == query_start_loc[request]:
                    kv, gate = projected_row(x, compressor_wkv, compressor_wgate, token, D, HEAD_DIM)
                    slot = block * RING + (position_ids[token] + RING - 1) % RING
                    before_kv = pypto.view(state_cache, [1, HEAD_DIM], [slot, 0])
                    before_gate = pypto.view(state_cache, [1, HEAD_DIM], [slot, HEAD_DIM])
                    row = pooled(before_kv, before_gate, kv, gate, compressor_norm, HEAD_DIM, eps)
                    pypto.assemble(row, [token, 0], latent)
                else:
                    kv, gate = projected_row(x, compressor_wkv, compressor_wgate, token, D, HEAD_DIM)
                    before_kv, before_gate = projected_row(x, compressor_wkv, compressor_wgate, token - 1, D, HEAD_DIM)
                    row = pooled(before_kv, before_gate, kv, gate, compressor_norm, HEAD_DIM, eps)
                    pypto.assemble(row, [token, 0], latent)
        for request in pypto.loop(state_block_table.shape[0], name="REQUESTS", idx_name="request"):
            block = state_block_table[request, 0]
            stop = pypto.min(query_start_loc[request + 1], num_tokens[0])
            kept = pypto.max(pypto.min(stop - query_start_loc[request], RING), 0) * pypto.min(block + 1, 1)
            for back in pypto.loop(kept, name="KEPT", idx_name="back"):
                token = stop - kept + back
                slot = block * RING + position_ids[token] % RING
                kv, gate = projected_row(x, compressor_wkv, compressor_wgate, token, D, HEAD_DIM)
                pypto.assemble(pypto.clone(kv), [slot, 0], state_cache)
                pypto.assemble(pypto.clone(gate), [slot, HEAD_DIM], state_cache)

    return compress_pairs
