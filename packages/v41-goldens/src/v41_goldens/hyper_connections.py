"""Hyper-connections: mixes, Sinkhorn split, collapse and expand (model.md section 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from v41_config.model_config import ModelConfig
from v41_goldens import exact
from v41_goldens.operand_shapes import check_shapes
from v41_goldens.rms_norm import inverse_rms
from v41_goldens.weights import HyperConnectionWeights

_TOKEN_TILE = 8
"""Tokens that are expanded at a time: their float64 sums (1.3 MB at FLASH's width) stay in cache."""


def mhc_mixes(x_hc: Tensor, weights: HyperConnectionWeights, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Mixing coefficients of a sublayer from the residual streams (model.md section 5).

    Args:
        x_hc: BF16 `[T, HC, D]`.
        weights: the sublayer's hyper-connection.

    Returns:
        FP32 `(pre [T, HC], post [T, HC], comb [T, HC, HC])`; comb[t, j, k] carries stream j into stream k. The
        sublayer uses `post` and `comb`; `pre` belongs to the next sublayer.
    """
    check_shapes("mhc_mixes", x_hc=x_hc, fn=weights.fn, base=weights.base, scale=weights.scale)
    streams = x_hc.flatten(1).to(torch.float32)
    mixes = weights.project(streams) * inverse_rms(streams, config.rms_norm_eps)
    return mhc_split(mixes, weights.scale, weights.base, config)


def mhc_split(mixes: Tensor, scale: Tensor, base: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The part of `mhc_mixes` after the projection (model.md section 5).

    Args:
        mixes: FP32 `[T, (2 + HC) * HC]`: HC entries for pre, HC for post, HC x HC for comb.
        scale: `[3]`, one factor for each of the three parts.
        base: `[(2 + HC) * HC]`.

    Returns:
        FP32 `(pre, post, comb)` as in `mhc_mixes`.
    """
    hc = config.hc_mult
    factors = scale.to(torch.float32).repeat_interleave(torch.tensor([hc, hc, hc * hc], device=scale.device))
    logits = mixes * factors + base.to(torch.float32)
    pre, post = exact.sigmoid(logits[:, : 2 * hc]).split(hc, dim=1)
    comb = _sinkhorn(logits[:, 2 * hc :].unflatten(1, (hc, hc)), config.hc_sinkhorn_iters, config.hc_eps)
    return pre + config.hc_eps, post * 2, comb


def mhc_pre(x_hc: Tensor, pre_mix: Tensor) -> Tensor:
    """Collapse the streams into a sublayer's input: `sum_j pre_j * X_j` (model.md section 5).

    Args:
        x_hc: BF16 `[T, HC, D]`.
        pre_mix: FP32 `[T, HC]`, from the sublayer before.

    Returns:
        BF16 `[T, D]`: FP32 products, summed by E3, one rounding.
    """
    check_shapes("mhc_pre", x_hc=x_hc, pre_mix=pre_mix)
    return exact.total(x_hc.to(torch.float32) * pre_mix.unsqueeze(-1), 1).to(torch.bfloat16)


def mhc_post(y: Tensor, x_hc: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Expand a sublayer's output: `X'_k = post_k * y + sum_j comb[j, k] * X_j` (model.md section 5).

    Args:
        y: BF16 `[T, D]`.
        x_hc: BF16 `[T, HC, D]`.
        post: FP32 `[T, HC]`.
        comb: FP32 `[T, HC, HC]`, summed over its first stream index.

    Returns:
        BF16 `[T, HC, D]`: FP32 products, the mix summed by E3, one rounding.
    """
    check_shapes("mhc_post", y=y, x_hc=x_hc, post=post, comb=comb)
    result = torch.empty_like(x_hc, dtype=torch.bfloat16)
    for start in range(0, len(x_hc), _TOKEN_TILE):
        rows = slice(start, start + _TOKEN_TILE)
        result[rows] = _expanded(y[rows], x_hc[rows], post[rows], comb[rows])
    return result


def _expanded(y: Tensor, x_hc: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """FP32 `[T, HC, D]` of a few tokens. The float64 sum is accumulated stream by stream, within a cache's size."""
    streams = x_hc.to(torch.float32)
    mixed = torch.zeros(x_hc.shape, dtype=torch.float64, device=x_hc.device)
    for j in range(x_hc.shape[1]):
        mixed += comb[:, j, :, None] * streams[:, j, None, :]
    carried = mixed.to(torch.float32).add_(0.0)  # E3: never -0
    return carried.add_(post.unsqueeze(-1) * y.to(torch.float32).unsqueeze(1))


def _sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """FP32 `[T, HC, HC]`: softmax over the target stream, then alternating column and row normalisation.

    Column sums come last, so only they are tight; `iterations` counts both kinds, softmax being the first row pass.
    """
    if not len(logits):
        return logits
    # Tokens innermost: sums over a stream index then run over whole vectors.
    c = logits.permute(1, 2, 0).contiguous()
    c = exact.exp(c - c.amax(1, keepdim=True))
    c.div_(_positive_total(c, 1)).add_(eps)
    c.div_(_positive_total(c, 0).add_(eps))
    for _ in range(iterations - 1):
        c.div_(_positive_total(c, 1).add_(eps))
        c.div_(_positive_total(c, 0).add_(eps))
    return c.permute(2, 0, 1).contiguous()


def _positive_total(c: Tensor, dim: int) -> Tensor:
    """`exact.total` (E3) of terms none of which is negative or -0, so that no sum is -0 either."""
    return c.sum(dim, keepdim=True, dtype=torch.float64).to(torch.float32)
