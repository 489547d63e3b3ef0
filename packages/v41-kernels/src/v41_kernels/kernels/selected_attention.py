"""Each token's attention over its window and its selected compressed entries (model.md sections 12 and 16)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable
from typing import Any

import pypto

from v41_kernels.kernels.stages.attention import CHUNK, attend_chunk, begun, write_attended
from v41_kernels.kernels.stages.cache_rows import compressed_rows, gathered, live_columns, window_rows

ROW_TILE = 1
COLUMN_TILE = 64
# Why: as in `sparse_attention`; a chunk of 64 rows is decoded from 33 KB (window) or 18 KB (compressed) where it is
# used. Where window and selection are whole chunks, a loop walks each of them; a small model's share one.


def sections(window: int, selected: int) -> list[tuple[int, list[tuple[bool, int, int]]]]:
    """Loops over the list of entries: trips, and the parts of a trip's chunk (from the window?, start, rows)."""
    if window % CHUNK == 0 and selected % CHUNK == 0:
        return [(window // CHUNK, [(True, 0, CHUNK)]), (selected // CHUNK, [(False, 0, CHUNK)])]
    chunks = []
    for start in range(0, window + selected, CHUNK):
        stop = min(start + CHUNK, window + selected)
        parts = []
        if start < window:
            parts.append((True, start, min(stop, window) - start))
        if stop > window:
            first = max(start, window)
            parts.append((False, first - window, stop - first))
        chunks.append((1, parts))
    return chunks


def decoded(source: Any, token: Any, start: Any, count: int, width: int, window: bool) -> Any:
    """BF16 `[count, width]` of rows of the window's (or the compressed) cache, `source` being cache, scale, numbers."""
    cache, scale, numbers = source
    stored, groups = (width, width // 32) if window else (width // 2, width // 16)
    codes = gathered(cache, numbers, token, start, count, stored)
    scales = gathered(scale, numbers, token, start, count, groups)
    decode = window_rows if window else compressed_rows
    return decode(codes, scales, count, width)


def walk(
    q: Any, state: Any, window: Any, selection: Any, token: Any, H: int, width: int, entries: int, selected: int
) -> None:
    """Takes every chunk of a token's list into the state."""
    for trips, parts in sections(entries, selected):
        total = sum(part[2] for part in parts)
        for chunk in pypto.loop(trips, name="CHUNKS", idx_name="chunk"):
            rows = pypto.tensor([total, width], pypto.DT_BF16, "chunk_rows")
            live = pypto.tensor([1, total], pypto.DT_FP32, "chunk_live")
            place = 0
            for from_window, first, count in parts:
                source = window if from_window else selection
                start = first + chunk * CHUNK
                part_rows = decoded(source, token, start, count, width, from_window)
                pypto.assemble(pypto.clone(part_rows), [place, 0], rows)
                pypto.assemble(live_columns(source[2], token, start, count), [0, place], live)
                place += count
            pypto.set_vec_tile_shapes(H, COLUMN_TILE)
            q_tile = pypto.view(q, [H, width], [token * H, 0])
            attend_chunk(q_tile, rows, live, state, H, total, width)


def make_entry(*, H_local: int, HEAD_DIM: int, WINDOW: int, INDEX_TOPK: int) -> Callable[..., None]:
    """The entry for `H_local` heads, windows of `WINDOW` tokens and selections of `INDEX_TOPK` entries."""

    def selected_attention(
        q: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM], pypto.DT_BF16),
        window_kv: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM], pypto.DT_INT8),
        window_kv_scale: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM // 32], pypto.DT_INT8),
        window_indices: pypto.Tensor([pypto.DYNAMIC, WINDOW], pypto.DT_INT32),
        compressed_kv: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM // 2], pypto.DT_INT8),
        compressed_kv_scale: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM // 16], pypto.DT_INT8),
        topk_rows: pypto.Tensor([pypto.DYNAMIC, INDEX_TOPK], pypto.DT_INT32),
        attn_sink: pypto.Tensor([H_local], pypto.DT_FP32),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        o: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM], pypto.DT_BF16),
    ):
        for token in pypto.loop(num_tokens[0], name="TOKENS", idx_name="token"):
            state = begun(H_local, HEAD_DIM)
            window = [window_kv, window_kv_scale, window_indices]
            selection = [compressed_kv, compressed_kv_scale, topk_rows]
            walk(q, state, window, selection, token, H_local, HEAD_DIM, WINDOW, INDEX_TOPK)
            write_attended(state, attn_sink, o, token, H_local, HEAD_DIM)

    return selected_attention
