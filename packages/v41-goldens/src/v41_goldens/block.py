"""One layer: attention and MoE, each wrapped in staggered hyper-connections (model.md section 5)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from v41_config import LayerConfig
from v41_goldens.forward_context import ForwardContext
from v41_goldens.hyper_connections import mhc_mixes, mhc_post, mhc_pre
from v41_goldens.modes import ATTENTION
from v41_goldens.moe import moe
from v41_goldens.rms_norm import rms_norm
from v41_goldens.weights import HyperConnectionWeights, LayerWeights


def block(
    ctx: ForwardContext, layer: LayerConfig, weights: LayerWeights, x_hc: Tensor, pre_mix: Tensor, parts: int = 1
) -> tuple[Tensor, Tensor]:
    """Residual streams BF16 `[T, HC, D]` and the incoming pre-mix FP32 `[T, HC]` -> the same for the next layer.

    The pre-mix is staggered: attention collapses with the one that came in, MoE with the one that attention's
    mixes computed, and the one that MoE's mixes computed goes to the next layer. `parts`: see `o_proj`.
    """
    eps = ctx.config.rms_norm_eps
    attn_pre, attn_post, attn_comb = _mixes(ctx, layer, "attn", x_hc, weights.hc_attn)
    attn_in = ctx.record(layer, "attn_in", rms_norm(mhc_pre(x_hc, pre_mix), weights.attn_norm, eps))
    attn_out = ATTENTION[layer.mode](ctx, layer, weights.attention, attn_in, parts).bfloat16()
    x_hc = mhc_post(ctx.record(layer, "attn_out", attn_out), x_hc, attn_post, attn_comb)

    ffn_pre, ffn_post, ffn_comb = _mixes(ctx, layer, "ffn", x_hc, weights.hc_ffn)
    moe_in = ctx.record(layer, "moe_in", rms_norm(mhc_pre(x_hc, attn_pre), weights.ffn_norm, eps))
    moe_out = moe(moe_in, weights.moe, ctx.config, partial(ctx.record, layer))
    x_hc = mhc_post(ctx.record(layer, "moe_out", moe_out), x_hc, ffn_post, ffn_comb)
    return ctx.record(layer, "X", x_hc), ctx.record(layer, "pre_mix", ffn_pre)


def _mixes(
    ctx: ForwardContext, layer: LayerConfig, site: str, x_hc: Tensor, weights: HyperConnectionWeights
) -> tuple[Tensor, Tensor, Tensor]:
    pre, post, comb = mhc_mixes(x_hc, weights, ctx.config)
    for name, value in (("pre", pre), ("post", post), ("comb", comb)):
        ctx.record(layer, f"hc_{site}_{name}", value)
    return pre, post, comb


def entry_streams(embedded: Tensor, lanes: int) -> tuple[Tensor, Tensor]:
    """The first layer's input: the embedding BF16 `[T, D]` in every lane, and a pre-mix of lane zero alone."""
    pre_mix = torch.zeros(embedded.shape[0], lanes, dtype=torch.float32, device=embedded.device)
    pre_mix[:, 0] = 1.0
    return embedded.unsqueeze(1).repeat(1, lanes, 1), pre_mix
