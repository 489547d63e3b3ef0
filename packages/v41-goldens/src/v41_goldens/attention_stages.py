"""The stages that the six attention modes are composed of (model.md sections 8 to 13 and 16)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from v41_config import BLOCK_ROWS, LayerConfig
from v41_goldens.candidate_blocks import CandidateBlocks, candidate_blocks
from v41_goldens.capture import layer_key
from v41_goldens.compressor import CompressorRows, compress_ratio_1, compress_ratio_2
from v41_goldens.errors import OperandError, WeightError
from v41_goldens.forward_context import ForwardContext
from v41_goldens.indexer import IndexQueries, index_keys, index_queries, select_entries
from v41_goldens.output_projection import grouped_output, o_proj
from v41_goldens.paged_cache import publish_compressed_kv, publish_index_key, publish_window_kv
from v41_goldens.qkv import kv_proj_rope, q_proj_qr, q_proj_rope
from v41_goldens.quantisers import (
    dequantize_compressed_kv,
    dequantize_index,
    dequantize_window_kv,
    quantize_compressed_kv,
    quantize_index,
    quantize_window_kv,
)
from v41_goldens.rope import apply_rope
from v41_goldens.sparse_attention import CHUNK, sparse_attention
from v41_goldens.weights import AttentionWeights, IndexerWeights


def project_input(
    ctx: ForwardContext, layer: LayerConfig, weights: AttentionWeights, x: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`(qr [T, q_lora_rank], q [T, H, head_dim], kv [T, head_dim])` by three other stages; q and kv are rotated."""
    qr, q = project_queries(ctx, layer, weights, x)
    return qr, q, ctx.stages.kv_proj_rope(x, weights, *ctx.query_rope(layer), ctx.config)


@dataclass(frozen=True)
class AttentionStages:
    """The operators that the stages call, by name: goldens, each of which may be exchanged for one of its form.

    Whoever exchanges some puts the table into `ForwardContext.stages`. `qkv_proj_rope` is made of the three behind it.
    """

    qkv_proj_rope: Callable[..., tuple[Tensor, Tensor, Tensor]] = project_input
    q_proj_qr: Callable[..., Tensor] = q_proj_qr
    q_proj_rope: Callable[..., Tensor] = q_proj_rope
    kv_proj_rope: Callable[..., Tensor] = kv_proj_rope
    publish_window_kv: Callable[..., None] = publish_window_kv
    compress_ratio_1: Callable[..., Tensor] = compress_ratio_1
    compress_ratio_2: Callable[..., Tensor] = compress_ratio_2
    index_keys: Callable[..., Tensor] = index_keys
    publish_index_key: Callable[..., None] = publish_index_key
    publish_compressed_kv: Callable[..., None] = publish_compressed_kv
    index_queries: Callable[..., IndexQueries] = index_queries
    select_entries: Callable[..., Tensor] = select_entries
    candidate_blocks: Callable[..., CandidateBlocks] = candidate_blocks
    sparse_attention: Callable[..., Tensor] = sparse_attention
    grouped_output: Callable[..., Tensor] = grouped_output
    o_proj: Callable[..., Tensor] = o_proj


_TOKEN_TILE = 64
"""Tokens attended together: bounds the gathered KV; a token's bits do not depend on it."""


def project_queries(
    ctx: ForwardContext, layer: LayerConfig, weights: AttentionWeights, x: Tensor
) -> tuple[Tensor, Tensor]:
    """`(qr [T, q_lora_rank], q [T, H, head_dim])`, BF16; q is rotated."""
    qr = ctx.stages.q_proj_qr(x, weights, ctx.config)
    q = ctx.stages.q_proj_rope(qr, weights, *ctx.query_rope(layer), ctx.config)
    ctx.record(layer, "qr", qr)
    ctx.record(layer, "q", q)
    return qr, q


def publish_window(ctx: ForwardContext, layer: LayerConfig, kv: Tensor) -> None:
    """Every layer's own window KV, quantised into its pages."""
    ctx.stages.publish_window_kv(ctx.caches.window[layer.layer_id], ctx.metadata.window_slots, kv)
    if ctx.capture is not None:
        ctx.record(layer, "window_kv", dequantize_window_kv(quantize_window_kv(kv)))


def publish_compressed(ctx: ForwardContext, layer: LayerConfig, weights: AttentionWeights, x: Tensor) -> None:
    """Compress, then publish the index key and the rotated compressed KV of every group that closes here."""
    source, meta = layer.layer_id, ctx.metadata
    if weights.compressor is None or weights.index_keys is None:
        raise WeightError(f"layers.{source}.attn.compressor", None, "compressor and index key weights of a KV source")
    closing = meta.compressor_source_token_indices[source].long()
    if layer.compress_ratio == 1:
        latent = ctx.stages.compress_ratio_1(x, weights.compressor, ctx.config)[closing]
    else:
        rows = CompressorRows.of(meta, source)
        latent = ctx.stages.compress_ratio_2(x, weights.compressor, rows, ctx.caches.state[source], ctx.config)
    cos, sin = (rows[closing] for rows in ctx.compressed_rope(layer))
    keys = ctx.stages.index_keys(latent, weights.index_keys, cos, sin, ctx.config)
    entries = apply_rope(latent, cos, sin)
    ctx.stages.publish_index_key(ctx.caches.index_key[source], meta.index_slots[source][closing], keys)
    ctx.stages.publish_compressed_kv(ctx.caches.compressed[source], meta.compressed_slots[source][closing], entries)
    if ctx.capture is not None:
        ctx.record(layer, "compressed_latent", latent)
        ctx.record(layer, "compressed_kv", dequantize_compressed_kv(quantize_compressed_kv(entries)))
        ctx.record(layer, "index_k", dequantize_index(quantize_index(keys)))


def publish_selection(
    ctx: ForwardContext, layer: LayerConfig, indexer: IndexerWeights | None, x: Tensor, qr: Tensor
) -> None:
    """Score this layer's keys and leave the selection's physical rows for every layer that reads them."""
    if indexer is None:
        raise WeightError(f"layers.{layer.layer_id}.attn.indexer", None, "indexer weights of an index source")
    queries = ctx.stages.index_queries(qr, x, indexer, *ctx.query_rope(layer), ctx.config)
    entries = ctx.record(layer, "topk", ctx.stages.select_entries(ctx, layer, queries))
    ctx.topk[layer.layer_id] = physical_rows(ctx, layer, entries)


def attend(ctx: ForwardContext, layer: LayerConfig, weights: AttentionWeights, q: Tensor, parts: int = 1) -> Tensor:
    """Window entries, then the source's selected entries; the output's FP32 partial `[T, D]` (`o_proj` has `parts`)."""
    window, meta = ctx.caches.window[layer.layer_id], ctx.metadata
    out = torch.empty_like(q)
    for start in range(0, q.shape[0], _TOKEN_TILE):
        tile = slice(start, start + _TOKEN_TILE)
        rows = meta.window_indices[tile]
        kv = window.read(rows)
        if layer.kv_source is not None and layer.index_source is not None:
            selected = _without_empty_chunks(ctx.topk[layer.index_source][tile], rows.shape[1])
            kv = torch.cat([kv, ctx.caches.compressed[layer.kv_source].read(selected)], dim=1)
            rows = torch.cat([rows, selected], dim=1)
        scale = ctx.config.head_dim**-0.5
        out[tile] = ctx.stages.sparse_attention(q[tile], kv, rows >= 0, weights.attn_sink, scale)
    ctx.record(layer, "sparse_attn_out", out)
    u = ctx.stages.grouped_output(out, weights, *ctx.query_rope(layer), ctx.config)
    return ctx.stages.o_proj(u, weights, ctx.config, parts)


def _without_empty_chunks(selected: Tensor, before: int) -> Tensor:
    """`[T, k]` without the chunks of E4 at its end where no token has an entry; `before` entries precede it.

    They change no bit, and a short prompt has little else: at 64 tokens all but 32 of 512 entries are empty.
    """
    columns = (selected >= 0).any(dim=0).nonzero()
    used = int(columns[-1]) + 1 if len(columns) else 0
    return selected[:, : -(-(before + used) // CHUNK) * CHUNK - before]


def physical_rows(ctx: ForwardContext, layer: LayerConfig, entries: Tensor) -> Tensor:
    """Logical entries `[T, k]` of each token's request as physical compressed rows, -1 kept.

    Raises:
        OperandError: another number of rows than the batch has, or an entry that its token does not see.
    """
    if layer.kv_source is None:
        raise OperandError(f"layer {layer.layer_id}", layer.mode.title, "a mode with compressed KV")
    table = ctx.metadata.compressed_block_tables[layer.kv_source]
    if entries.dim() != 2 or len(entries) != len(ctx.metadata.position_ids):
        raise OperandError(layer_key(layer.layer_id, "topk"), tuple(entries.shape), "a row of entries for each token")
    visible = ctx.metadata.compressed_lens[layer.kv_source].unsqueeze(-1)
    invisible = entries >= visible
    if invisible.any():  # only a selection that was injected can name one
        row = int(invisible.any(dim=1).int().argmax())
        raise OperandError(f"{layer_key(layer.layer_id, 'topk')}[{row}]", int(entries[row].max()),
                           f"entries below {int(visible[row])}, those visible to the token")  # fmt: skip
    if table.shape[1] == 0:
        return torch.full_like(entries, -1)
    known = entries.clamp(min=0).long()
    block = table[ctx.metadata.token_to_req_indices.long().unsqueeze(-1), known // BLOCK_ROWS]
    return torch.where(entries >= 0, block * BLOCK_ROWS + known % BLOCK_ROWS, -1).int()
