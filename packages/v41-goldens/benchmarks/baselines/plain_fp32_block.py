"""A C2A Full block as one would write it down in FP32, for one prompt from position 0 and without caches.

Every weight is dequantised whole, by the package's own dequantiser, and every product is an FP32 matmul of all rows.
Rounding boundaries are those of model.md.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, silu, softplus

from v41_config import ModelConfig
from v41_goldens import LayerWeights
from v41_goldens.quantisers import (
    dequantize_activation,
    dequantize_compressed_kv,
    dequantize_index,
    dequantize_window_kv,
    quantize_activation,
    quantize_compressed_kv,
    quantize_index,
    quantize_window_kv,
)
from v41_goldens.quantized_weights import Fp4Weight, Fp8Weight
from v41_goldens.rope import apply_rope
from v41_goldens.weights import AttentionWeights, ExpertWeights, HyperConnectionWeights, MoeWeights

Rows = tuple[Tensor, Tensor]


def plain_block(
    config: ModelConfig, weights: LayerWeights, x_hc: Tensor, pre_mix: Tensor, rope: Rows
) -> tuple[Tensor, Tensor]:
    """Streams BF16 `[T, HC, D]` and pre-mix of the next layer; `rope` holds the rows of positions 0 to T - 1."""
    attn_pre, attn_post, attn_comb = _mixes(x_hc, weights.hc_attn, config)
    x = _norm(_collapse(x_hc, pre_mix), weights.attn_norm, config)
    x_hc = _expand(_attention(x, weights.attention, rope, config), x_hc, attn_post, attn_comb)
    ffn_pre, ffn_post, ffn_comb = _mixes(x_hc, weights.hc_ffn, config)
    x = _norm(_collapse(x_hc, attn_pre), weights.ffn_norm, config)
    return _expand(_moe(x, weights.moe, config), x_hc, ffn_post, ffn_comb), ffn_pre


def _lin(x: Tensor, w: Fp8Weight | Fp4Weight) -> Tensor:
    return linear(dequantize_activation(quantize_activation(x)), w.dequantize()).bfloat16()


def _norm(x: Tensor, weight: Tensor, config: ModelConfig) -> Tensor:
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_norm_eps) * weight.float()).bfloat16()


def _collapse(x_hc: Tensor, pre: Tensor) -> Tensor:
    return (x_hc.float() * pre.unsqueeze(-1)).sum(1).bfloat16()


def _expand(y: Tensor, x_hc: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    mixed = torch.einsum("tjk,tjd->tkd", comb, x_hc.float())
    return (mixed + post.unsqueeze(-1) * y.float().unsqueeze(1)).bfloat16()


def _mixes(x_hc: Tensor, weights: HyperConnectionWeights, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    hc, eps = config.hc_mult, config.hc_eps
    streams = x_hc.flatten(1).float()
    mixes = linear(streams, weights.fn) * torch.rsqrt(streams.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    factors = weights.scale.repeat_interleave(torch.tensor([hc, hc, hc * hc]))
    logits = mixes * factors + weights.base
    pre, post = logits[:, : 2 * hc].sigmoid().split(hc, dim=1)
    comb = logits[:, 2 * hc :].unflatten(1, (hc, hc)).softmax(-1) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(config.hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return pre + eps, post * 2, comb


def _attention(x: Tensor, w: AttentionWeights, rope: Rows, config: ModelConfig) -> Tensor:
    tokens = len(x)
    assert w.compressor is not None
    assert w.compressor.wgate is not None
    assert w.index_keys is not None
    assert w.indexer is not None
    qr = _norm(_lin(x, w.wq_a), w.q_norm, config)
    q = apply_rope(_lin(qr, w.wq_b).unflatten(-1, (-1, config.head_dim)), *rope)
    window_kv = dequantize_window_kv(quantize_window_kv(apply_rope(_norm(_lin(x, w.wkv), w.kv_norm, config), *rope)))

    pairs = (tokens // 2, 2)
    kv = linear(x.float(), w.compressor.wkv.float())[: 2 * pairs[0]].unflatten(0, pairs)
    gate = linear(x.float(), w.compressor.wgate.float())[: 2 * pairs[0]].unflatten(0, pairs)
    latent = _norm((gate.softmax(1) * kv).sum(1).bfloat16(), w.compressor.norm, config)
    first = (rope[0][: 2 * pairs[0] : 2], rope[1][: 2 * pairs[0] : 2])
    compressed = dequantize_compressed_kv(quantize_compressed_kv(apply_rope(latent, *first)))
    keys = _norm(linear(latent.float(), w.index_keys.wk.float()).bfloat16(), w.index_keys.k_norm, config)
    keys = dequantize_index(quantize_index(apply_rope(keys, *first)))

    position = torch.arange(tokens)
    index_q = apply_rope(_lin(qr, w.indexer.wq_b).unflatten(-1, (-1, config.index_head_dim)), *rope)
    index_q = dequantize_index(quantize_index(index_q))
    head_weights = linear(x.float(), w.indexer.weights_proj.float()).bfloat16().float()
    head_weights = (head_weights * (config.index_head_dim**-0.5 * config.index_n_heads**-0.5)).bfloat16()
    products = torch.einsum("thd,ed->the", index_q.float(), keys.float()).bfloat16().relu()
    scores = (products * head_weights.unsqueeze(-1)).sum(1)
    scores = scores.masked_fill(torch.arange(pairs[0]) >= (position.unsqueeze(-1) + 1) // 2, -torch.inf)
    top = scores.topk(min(config.index_topk, pairs[0]), dim=-1)
    selected = torch.where(top.values > -torch.inf, top.indices, -1)
    selected = pad(selected, (0, config.index_topk - selected.shape[1]), value=-1)

    window = position.unsqueeze(-1) - torch.arange(config.sliding_window - 1, -1, -1)
    gathered = torch.cat([window_kv[window.clamp(min=0)], compressed[selected.clamp(min=0)]], dim=1).float()
    hidden = torch.cat([window < 0, selected < 0], dim=1)
    logits = torch.einsum("thd,tnd->thn", q.float(), gathered) * config.head_dim**-0.5
    logits = logits.masked_fill(hidden.unsqueeze(1), -torch.inf)
    logits = torch.cat([logits, w.attn_sink.view(1, -1, 1).expand(tokens, -1, 1)], dim=-1)
    out = torch.einsum("thn,tnd->thd", logits.softmax(-1)[..., :-1], gathered).bfloat16()

    out = apply_rope(out, *rope, inverse=True).unflatten(1, (config.o_groups, -1)).flatten(2)
    wo_a = w.wo_a.dequantize().unflatten(0, (config.o_groups, -1))
    u = torch.einsum("tgk,gnk->tgn", out.float(), wo_a).bfloat16().flatten(1)
    return _lin(u, w.wo_b)


def _expert(x: Tensor, w: ExpertWeights, limit: float, route_weight: Tensor | None = None) -> Tensor:
    gate, up = _lin(x, w.w1).float(), _lin(x, w.w3).float()
    z = silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)
    return _lin((z if route_weight is None else route_weight * z).bfloat16(), w.w2)


def _moe(x: Tensor, w: MoeWeights, config: ModelConfig) -> Tensor:
    scores = softplus(linear(x.float(), w.gate.float())).sqrt()
    chosen = (scores + w.gate_bias).topk(config.num_experts_per_tok, dim=-1).indices
    route = scores.gather(1, chosen)
    route = route / (route.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
    result = torch.zeros(x.shape)
    for expert_id, weights in w.experts.items():
        token, place = (chosen == expert_id).nonzero(as_tuple=True)
        if len(token):
            y = _expert(x[token], weights, config.swiglu_limit, route[token, place].unsqueeze(-1))
            result.index_add_(0, token, y.float())
    return (result + _expert(x, w.shared, config.swiglu_limit).float()).bfloat16()
