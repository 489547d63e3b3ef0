"""C1A Reuse: attend to the compressed KV of its KV source and the latest selection over it."""

from __future__ import annotations

from torch import Tensor

from v41_config import LayerConfig
from v41_goldens.attention_stages import attend, publish_window
from v41_goldens.forward_context import ForwardContext
from v41_goldens.weights import AttentionWeights


def attn_c1a_reuse(
    ctx: ForwardContext, layer: LayerConfig, weights: AttentionWeights, x: Tensor, parts: int = 1
) -> Tensor:
    """x BF16 `[T, D]` (normed attention input) -> FP32 output partial `[T, D]`."""
    _, q, kv = ctx.stages.qkv_proj_rope(ctx, layer, weights, x)
    publish_window(ctx, layer, kv)
    return attend(ctx, layer, weights, q, parts)
