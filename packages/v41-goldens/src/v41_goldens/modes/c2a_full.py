"""C2A Full: compress pairs of tokens, publish their KV and index keys, select, attend."""

from __future__ import annotations

from torch import Tensor

from v41_config import LayerConfig
from v41_goldens.attention_stages import attend, publish_compressed, publish_selection, publish_window
from v41_goldens.forward_context import ForwardContext
from v41_goldens.weights import AttentionWeights


def attn_c2a_full(
    ctx: ForwardContext, layer: LayerConfig, weights: AttentionWeights, x: Tensor, parts: int = 1
) -> Tensor:
    """x BF16 `[T, D]` (normed attention input) -> FP32 output partial `[T, D]`."""
    qr, q, kv = ctx.stages.qkv_proj_rope(ctx, layer, weights, x)
    publish_window(ctx, layer, kv)
    publish_compressed(ctx, layer, weights, x)
    publish_selection(ctx, layer, weights.indexer, x, qr)
    return attend(ctx, layer, weights, q, parts)
