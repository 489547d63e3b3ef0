"""Each token's attention over its own list of entries (model.md section 12)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.attention import CHUNK, attend_chunk, begun, write_attended
from v41_kernels.kernels.stages.rows import row_tile

ROW_TILE = 1
COLUMN_TILE = 64
# Why: a token has a list of its own, so a tile is one token with all its heads: 64 heads x 64 scores are 16 KB, the
# accumulators 64 x 512 FP32 are 128 KB and move through the unified buffer in columns of 64.


def make_entry(*, H_local: int, HEAD_DIM: int, ATTENDED: int) -> Callable[..., None]:
    """The entry for `H_local` heads and lists of `ATTENDED` entries, whose last chunk may be ragged."""

    def sparse_attention(
        q: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM], pypto.DT_BF16),
        kv: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM], pypto.DT_BF16),
        valid: pypto.Tensor([pypto.DYNAMIC, max(ATTENDED, 1)], pypto.DT_BOOL),
        attn_sink: pypto.Tensor([H_local], pypto.DT_FP32),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        o: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM], pypto.DT_BF16),
    ):
        for token in pypto.loop(num_tokens[0], name="TOKENS", idx_name="token"):
            state = begun(H_local, HEAD_DIM)
            for chunk in pypto.loop((ATTENDED + CHUNK - 1) // CHUNK, name="CHUNKS", idx_name="chunk"):
                start = chunk * CHUNK
                entries = pypto.min(ATTENDED - start, CHUNK)
                pypto.set_vec_tile_shapes(H_local, COLUMN_TILE)
                q_tile = pypto.view(q, [H_local, HEAD_DIM], [token * H_local, 0])
                rows = row_tile(kv, CHUNK, token * ATTENDED + start, entries, HEAD_DIM)
                flags = pypto.view(valid, [1, CHUNK], [token, start], valid_shape=[1, entries])
                live = pypto.where(flags, 1.0, 0.0)
                attend_chunk(q_tile, rows, live, state, H_local, CHUNK, HEAD_DIM, entries)
            write_attended(state, attn_sink, o, token, H_local, HEAD_DIM)

    return sparse_attention
