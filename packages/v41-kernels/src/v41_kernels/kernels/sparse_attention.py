"""Attention over each token's own list of entries, with a sink (model.md section 12)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.attention import CHUNK, attend, attended, running_softmax
from v41_kernels.kernels.stages.rows import row_tile

ROW_TILE = 1
COLUMN_TILE = 64
# Why: no two tokens attend to the same list, so a tile is one token with all of its heads, and a chunk at a time.


def make_entry(*, H_local: int, HEAD_DIM: int, ATTENDED: int) -> Callable[..., None]:
    """The entry for a rank's heads and lists of `ATTENDED` entries, whose last chunk may be ragged."""

    def sparse_attention(
        q: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM], pypto.DT_BF16),
        kv: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM], pypto.DT_BF16),
        valid: pypto.Tensor([pypto.DYNAMIC, ATTENDED], pypto.DT_INT8),
        attn_sink: pypto.Tensor([H_local, 1], pypto.DT_FP32),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        o: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM], pypto.DT_BF16),
    ):
        for token in pypto.loop(num_tokens[0], name="TOKENS", idx_name="token"):
            softmax = running_softmax(H_local, HEAD_DIM)
            for chunk in pypto.loop((ATTENDED + CHUNK - 1) // CHUNK, name="CHUNKS", idx_name="chunk"):
                first = chunk * CHUNK
                entries = pypto.min(ATTENDED - first, CHUNK)
                pypto.set_vec_tile_shapes(CHUNK, CHUNK)
                live = pypto.view(valid, [1, CHUNK], [token, first], valid_shape=[1, entries])
                live = pypto.cast(pypto.cast(live, pypto.DT_FP16), pypto.DT_FP32)
                heads = row_tile(q, H_local, token * H_local, H_local, HEAD_DIM)
                chunk_kv = row_tile(kv, CHUNK, token * ATTENDED + first, entries, HEAD_DIM)
                attend(softmax, heads, chunk_kv, live, entries, H_local, HEAD_DIM)
            pypto.assemble(attended(softmax, attn_sink), [token * H_local, 0], o)

    return sparse_attention
