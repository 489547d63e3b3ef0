"""Queries and window KV from the attention input (model.md section 8)."""

from __future__ import annotations

from torch import Tensor

from v41_config import ModelConfig
from v41_goldens.linear import quantized_linear
from v41_goldens.rms_norm import rms_norm
from v41_goldens.rope import apply_rope
from v41_goldens.weights import AttentionWeights


def q_proj_qr(x: Tensor, weights: AttentionWeights, config: ModelConfig) -> Tensor:
    """The low-rank query latent: x BF16 `[T, D]` -> BF16 `[T, q_lora_rank]`, normed."""
    return rms_norm(quantized_linear(x, weights.wq_a), weights.q_norm, config.rms_norm_eps)


def q_proj_rope(
    qr: Tensor, weights: AttentionWeights, rope_cos: Tensor, rope_sin: Tensor, config: ModelConfig
) -> Tensor:
    """Rotated queries: qr BF16 `[T, q_lora_rank]` -> BF16 `[T, H, head_dim]`; H is what `weights` hold."""
    q = quantized_linear(qr, weights.wq_b).unflatten(-1, (-1, config.head_dim))
    return apply_rope(q, rope_cos, rope_sin)


def kv_proj_rope(
    x: Tensor, weights: AttentionWeights, rope_cos: Tensor, rope_sin: Tensor, config: ModelConfig
) -> Tensor:
    """Rotated window KV, one head for keys and values: x BF16 `[T, D]` -> BF16 `[T, head_dim]`, not yet quantised."""
    kv = rms_norm(quantized_linear(x, weights.wkv), weights.kv_norm, config.rms_norm_eps)
    return apply_rope(kv, rope_cos, rope_sin)


def qkv_proj_rope(
    x: Tensor, weights: AttentionWeights, rope_cos: Tensor, rope_sin: Tensor, config: ModelConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """`(qr, q, kv)` of one input: the three above."""
    qr = q_proj_qr(x, weights, config)
    return (
        qr,
        q_proj_rope(qr, weights, rope_cos, rope_sin, config),
        kv_proj_rope(x, weights, rope_cos, rope_sin, config),
    )
