"""The indexer: index keys and queries, their scores, and the selection of each token (model.md section 10)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from v41_config import BLOCK_ROWS, LayerConfig, ModelConfig
from v41_goldens.candidate_blocks import entries_of_blocks
from v41_goldens.capture import layer_key
from v41_goldens.errors import OperandError
from v41_goldens.exact import dot, total
from v41_goldens.forward_context import ForwardContext
from v41_goldens.linear import bf16_linear, quantized_linear
from v41_goldens.paged_cache import RowCache
from v41_goldens.quantisers import dequantize_index, quantize_index
from v41_goldens.rms_norm import rms_norm
from v41_goldens.rope import apply_rope
from v41_goldens.top_k import select_positions
from v41_goldens.weights import IndexerWeights, IndexKeyWeights

_TILE_ROWS = 64
"""Query rows of one request scored together: enough to amortise reading its keys."""

_KEY_TILE = 2048
"""Keys decoded and scored at a time."""

_PRODUCT_BYTES = 16
"""Memory that one product of a query head with a key takes at most: float64, FP32 and BF16 beside each other."""

_SCORE_BYTES = 64
"""The same for one score: BF16, masked, and as INT64 sort keys."""


class IndexQueries(NamedTuple):
    """`q` BF16 `[T, heads, index_head_dim]`, quantised and decoded again; `weights` BF16 `[T, heads]`."""

    q: Tensor
    weights: Tensor


def index_keys(
    latent: Tensor, weights: IndexKeyWeights, rope_cos: Tensor, rope_sin: Tensor, config: ModelConfig
) -> Tensor:
    """Rotated index keys of un-rotated latents: BF16 `[n, head_dim]` -> `[n, index_head_dim]`, not yet quantised."""
    return apply_rope(
        rms_norm(bf16_linear(latent, weights.wk), weights.k_norm, config.rms_norm_eps), rope_cos, rope_sin
    )


def index_queries(
    qr: Tensor, x: Tensor, weights: IndexerWeights, rope_cos: Tensor, rope_sin: Tensor, config: ModelConfig
) -> IndexQueries:
    """Index queries from the query latent `[T, q_lora_rank]`, head weights from the attention input `[T, D]`."""
    q = quantized_linear(qr, weights.wq_b).unflatten(-1, (-1, config.index_head_dim))
    q = dequantize_index(quantize_index(apply_rope(q, rope_cos, rope_sin)))
    scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
    return IndexQueries(q, (bf16_linear(x, weights.weights_proj).float() * scale).bfloat16())


def index_scores(queries: IndexQueries, keys: Tensor) -> Tensor:
    """Scores BF16 `[..., R, entries]` of `[..., R, heads, dim]` queries against keys BF16 `[..., entries, dim]`.

    BF16 after the dot product, after the head weight and after the sum over heads.
    """
    return weighted_sum(dot(queries.q.flatten(-3, -2), keys).bfloat16(), queries.weights)


def weighted_sum(products: Tensor, weights: Tensor) -> Tensor:
    """Scores BF16 `[..., R, entries]` of BF16 products `[..., R * heads, entries]` and weights `[..., R, heads]`."""
    by_head = products.relu().unflatten(-2, weights.shape[-2:])
    return total((by_head.float() * weights.unsqueeze(-1).float()).bfloat16(), dim=-2).bfloat16()


@dataclass(frozen=True)
class _ScoreTiles:
    """Tiles of query rows of one request each: `tokens` `[n, R]` packed rows (-1 padding), `request` `[n]`."""

    tokens: Tensor
    request: Tensor
    entries: int


def _score_tiles(ctx: ForwardContext, source: int) -> Iterator[_ScoreTiles]:
    """Cut the batch into groups of tiles whose scores fit `max_logits_bytes`; at least one row goes through.

    Bytes count the products of one key tile over all heads and the row's scores, both at their peak. A row's bits
    do not depend on the tile it stands in.
    """
    meta, config = ctx.metadata, ctx.config
    lens, starts = meta.query_lens.long(), meta.query_start_loc.long()
    entries = int(meta.compressed_lens[source].max()) if meta.compressed_lens[source].numel() else 0
    row_bytes = _PRODUCT_BYTES * config.index_n_heads * min(entries, _KEY_TILE) + _SCORE_BYTES * entries
    rows_in_budget = max(1, ctx.max_logits_bytes // max(1, row_bytes))
    rows = max(1, min(int(lens.max()) if lens.numel() else 1, _TILE_ROWS, rows_in_budget))
    tiles_of = (lens + rows - 1) // rows
    request = torch.repeat_interleave(torch.arange(len(lens), device=lens.device), tiles_of)
    first_tile = torch.cumsum(tiles_of, 0) - tiles_of
    tile_in_request = torch.arange(len(request), device=lens.device) - first_tile[request]
    offset = tile_in_request.unsqueeze(-1) * rows + torch.arange(rows, device=lens.device)
    tokens = torch.where(offset < lens[request].unsqueeze(-1), starts[request].unsqueeze(-1) + offset, -1)
    group = max(1, rows_in_budget // rows)
    for tokens_part, request_part in zip(tokens.split(group), request.split(group), strict=True):
        yield _ScoreTiles(tokens_part, request_part, entries)


def _read_keys(cache: RowCache, table: Tensor, entry: Tensor) -> Tensor:
    """Keys BF16 `[n, entries, dim]` of logical entries `[entries]` through block tables `[n, pages]`."""
    page = entry // BLOCK_ROWS
    inside = page < table.shape[1]
    block = table[:, torch.where(inside, page, 0)] if table.shape[1] else table.new_full((len(table), len(entry)), -1)
    row = torch.where(inside & (block >= 0), block * BLOCK_ROWS + entry % BLOCK_ROWS, -1)
    return cache.read(row)


def select_entries(
    ctx: ForwardContext,
    layer: LayerConfig,
    queries: IndexQueries,
    score: Callable[[IndexQueries, Tensor], Tensor] = index_scores,
) -> Tensor:
    """Every token's selection: logical entries INT32 `[T, index_topk]`, ascending, -1 padded.

    The candidate source leaves its kept blocks in the context; the layers it restricts read them there. Nothing
    but the selection outlives a tile. `score` makes the scores, of any number of rows and keys.

    Raises:
        OperandError: a score of a visible entry is NaN, the layer has no compressed KV, or its candidate source has
            not run.
    """
    config, meta = ctx.config, ctx.metadata
    source = layer.kv_source
    if source is None:
        raise OperandError(f"layer {layer.layer_id}", layer.mode.title, "a mode with compressed KV")
    cache, tokens = ctx.caches.index_key[source], queries.q.shape[0]
    device = queries.q.device
    selected = torch.full((tokens, config.index_topk), -1, dtype=torch.int32, device=device)
    visible_of, table = meta.compressed_lens[source], meta.compressed_block_tables[source].long()
    captured: list[tuple[Tensor, Tensor, Tensor | None]] = []
    for tile in _score_tiles(ctx, source):
        live, rows = tile.tokens >= 0, tile.tokens.clamp(min=0)
        if tile.entries == 0:
            continue
        part = IndexQueries(queries.q[rows], queries.weights[rows])
        entry = torch.arange(tile.entries, device=device)
        scores = torch.cat(
            [score(part, _read_keys(cache, table[tile.request], keys)) for keys in entry.split(_KEY_TILE)], dim=-1
        )
        visible = torch.where(live, visible_of[rows], 0)
        scores = torch.where(entry < visible.unsqueeze(-1), scores, -torch.inf)
        _require_numbers(layer, tile, scores)
        block_score = None
        if layer.makes_candidates:
            if ctx.candidate_blocks is None:
                blocks = -(-tile.entries // config.candidate_block_size)
                ctx.candidate_blocks = torch.zeros(tokens, blocks, dtype=torch.bool, device=device)
            blocks_kept, block_score = ctx.stages.candidate_blocks(scores, visible, config)
            ctx.candidate_blocks[tile.tokens[live]] = blocks_kept[live]
        if layer.candidate_source is not None:
            scores = torch.where(
                _candidate_entries(ctx, layer.candidate_source, rows, tile.entries), scores, -torch.inf
            )
        selected[tile.tokens[live]] = select_positions(scores, config.index_topk)[live]
        if ctx.capture is not None:
            captured.append((tile.tokens[live], scores[live], None if block_score is None else block_score[live]))
    _record_scores(ctx, layer, captured)
    return selected


def _require_numbers(layer: LayerConfig, tile: _ScoreTiles, scores: Tensor) -> None:
    """A NaN has no place in an order; invisible entries, whatever stands in their rows, are -inf by now."""
    unknown = scores.isnan().any(dim=-1)
    if unknown.any():
        token = int(tile.tokens[unknown].min())
        raise OperandError(f"{layer_key(layer.layer_id, 'index_score')}[{token}]", "a NaN",
                           "a number for every entry that the token sees")  # fmt: skip


def _candidate_entries(ctx: ForwardContext, source: int, rows: Tensor, entries: int) -> Tensor:
    """Entries that the candidate source allows packed rows `rows`, bool `[..., entries]`."""
    stored = ctx.injected.get(layer_key(source, "candidate_mask"))
    if stored is not None:
        return stored[rows][..., :entries].bool()
    if ctx.candidate_blocks is None:
        raise OperandError("candidate_blocks", None, "the candidate source to run before the layers it restricts")
    return entries_of_blocks(ctx.candidate_blocks[rows], entries, ctx.config)


def _record_scores(ctx: ForwardContext, layer: LayerConfig, parts: list[tuple[Tensor, Tensor, Tensor | None]]) -> None:
    """Record the tensor given to top-k and, at the candidate source, block scores and the entry mask."""
    if ctx.capture is None:
        return
    if not parts:  # no token of the batch sees an entry yet
        rows = ctx.metadata.position_ids.shape[0]
        ctx.record(
            layer, "index_score", torch.empty(rows, 0, dtype=torch.bfloat16, device=ctx.metadata.position_ids.device)
        )
        return
    order = torch.argsort(torch.cat([tokens for tokens, _, _ in parts]))
    ctx.record(layer, "index_score", torch.cat([scores for _, scores, _ in parts])[order])
    if layer.makes_candidates and ctx.candidate_blocks is not None:
        block_scores = [block_score for _, _, block_score in parts if block_score is not None]
        ctx.record(layer, "candidate_block_score", torch.cat(block_scores)[order])
        entries = parts[0][1].shape[-1]
        ctx.record(layer, "candidate_mask", entries_of_blocks(ctx.candidate_blocks, entries, ctx.config))
