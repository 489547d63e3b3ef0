"""Attention, index scores and compression in fast arithmetic, and the table of stages with them in the goldens' places.

Tensors are those of the exact stages. Scores, probabilities and their sums are FP32 here, without chunks; index scores
are BF16 products. A token's bits do not depend on its batch: each token is a problem of its own, of a size that its own
list gives, and index scores are made in tiles of a fixed size.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from v41_goldens import row_tiles
from v41_goldens.attention_stages import AttentionStages
from v41_goldens.compressor import compress_ratio_2
from v41_goldens.indexer import IndexQueries, select_entries, weighted_sum
from v41_goldens.sparse_attention import check_operands

_TOKEN_TILE = 4
"""Tokens attended together: their gathered KV in FP32 stays in cache."""

_LIST_STEP = 64
"""Lists of entries are as long as a multiple of this."""

_KEY_TILE = 1024
"""Keys of one product of index scores."""


def fast_sparse_attention(q: Tensor, kv: Tensor, valid: Tensor, sink: Tensor, scale: float) -> Tensor:
    """`sparse_attention` with FP32 matmuls, exponentials and sums, and one maximum for the whole list.

    Of each token's list only the valid entries are taken, filled up to a multiple of `_LIST_STEP`: a size that is the
    token's own.
    """
    check_operands(q, kv, valid, sink)
    out = torch.zeros_like(q)
    counts = valid.sum(dim=1)
    order = torch.argsort(~valid, dim=1, stable=True)
    steps = (counts + _LIST_STEP - 1) // _LIST_STEP
    for step in steps.unique().tolist():
        size = min(step * _LIST_STEP, valid.shape[1])
        for tokens in (steps == step).nonzero().flatten().split(_TOKEN_TILE) if step else ():
            entries = order[tokens, :size]
            values = kv[tokens.unsqueeze(-1), entries].float()
            live = torch.arange(size, device=q.device) < counts[tokens].unsqueeze(-1)
            out[tokens] = _attended(q[tokens].float(), values, live, sink, scale).bfloat16()
    return out


def _attended(q: Tensor, values: Tensor, live: Tensor, sink: Tensor, scale: float) -> Tensor:
    """FP32 `[T, H, head_dim]` of FP32 operands; overwrites `values`. Every token has a live entry."""
    values.masked_fill_(~live.unsqueeze(-1), 0.0)
    scores = torch.bmm(q, values.transpose(-1, -2)).mul_(scale).masked_fill_(~live.unsqueeze(1), -torch.inf)
    maximum = scores.amax(-1, keepdim=True)
    p = scores.sub_(maximum).exp_()
    denominator = p.sum(-1, keepdim=True).add_(torch.exp(sink.view(-1, 1) - maximum))
    return torch.bmm(p.bfloat16().float(), values).div_(denominator)


def fast_index_scores(queries: IndexQueries, keys: Tensor) -> Tensor:
    """`index_scores` with BF16 products of FP32 sums; `keys` BF16 `[n, entries, dim]`, queries of n tiles of rows."""
    entries = keys.shape[-2]
    padded = torch.nn.functional.pad(keys, (0, 0, 0, -entries % _KEY_TILE))
    products = torch.stack(
        [
            torch.cat([_products(q, tile) for tile in own_keys.split(_KEY_TILE)], dim=-1)
            for q, own_keys in zip(queries.q.flatten(-3, -2), padded, strict=True)
        ]
    )
    return weighted_sum(products[..., :entries], queries.weights)


def _products(q: Tensor, keys: Tensor) -> Tensor:
    return row_tiles.matmul(q, len(keys), lambda start, stop: keys[start:stop])


FAST_STAGES = AttentionStages(
    sparse_attention=fast_sparse_attention,
    select_entries=partial(select_entries, score=fast_index_scores),
    compress_ratio_2=partial(compress_ratio_2, linear=row_tiles.fp32_linear),
)
"""The goldens' stages, with attention, index scores and the compressor of pairs in fast arithmetic."""
