"""Each token's attention over the rows of its window, read from their pages (model.md sections 12 and 16)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.attention import CHUNK, attend_chunk, begun, write_attended
from v41_kernels.kernels.stages.cache_rows import gathered, live_columns, window_rows
from v41_kernels.kernels.stages.linear import divisor_tile

ROW_TILE = 1
COLUMN_TILE = 64
# Why: as in `sparse_attention`; a chunk of 64 rows is decoded from 33 KB of bytes where it is used.


def make_entry(*, H_local: int, HEAD_DIM: int, WINDOW: int) -> Callable[..., None]:
    """The entry for `H_local` heads and windows of `WINDOW` tokens."""
    count = divisor_tile(WINDOW, CHUNK)

    def window_attention(
        q: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM], pypto.DT_BF16),
        window_kv: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM], pypto.DT_INT8),
        window_kv_scale: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM // 32], pypto.DT_INT8),
        window_indices: pypto.Tensor([pypto.DYNAMIC, WINDOW], pypto.DT_INT32),
        attn_sink: pypto.Tensor([H_local], pypto.DT_FP32),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        o: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM], pypto.DT_BF16),
    ):
        for token in pypto.loop(num_tokens[0], name="TOKENS", idx_name="token"):
            state = begun(H_local, HEAD_DIM)
            for chunk in pypto.loop(WINDOW // count, name="CHUNKS", idx_name="chunk"):
                start = chunk * count
                codes = gathered(window_kv, window_indices, token, start, count, HEAD_DIM)
                scales = gathered(window_kv_scale, window_indices, token, start, count, HEAD_DIM // 32)
                rows = window_rows(codes, scales, count, HEAD_DIM)
                live = live_columns(window_indices, token, start, count)
                pypto.set_vec_tile_shapes(H_local, COLUMN_TILE)
                q_tile = pypto.view(q, [H_local, HEAD_DIM], [token * H_local, 0])
                attend_chunk(q_tile, rows, live, state, H_local, count, HEAD_DIM)
            write_attended(state, attn_sink, o, token, H_local, HEAD_DIM)

    return window_attention
