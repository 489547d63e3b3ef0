"""The whole text model: embedding, every layer, final collapse, norm and head (model.md sections 4 and 15)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from v41_config import ModelConfig
from v41_goldens.block import block, entry_streams
from v41_goldens.errors import OperandError
from v41_goldens.forward_context import ForwardContext
from v41_goldens.hyper_connections import mhc_pre
from v41_goldens.linear import fp32_linear
from v41_goldens.rms_norm import rms_norm
from v41_goldens.weights import LayerWeights, ModelWeights


@dataclass(frozen=True)
class ForwardOutput:
    """`logits` FP32 `[T, V]` of every packed row, and the last layer's streams and pre-mix."""

    logits: Tensor
    x_hc: Tensor
    pre_mix: Tensor


def forward(ctx: ForwardContext, weights: ModelWeights, tokens: Tensor, parts: int = 1) -> ForwardOutput:
    """Token ids INT `[T]`, packed as `ctx.metadata` says -> logits of every row. `parts`: see `o_proj`.

    Raises:
        OperandError: another number of tokens than the metadata has, or an id outside the vocabulary; no cache row
            is written then.
    """
    check_tokens(tokens, ctx.metadata.position_ids.shape[0], ctx.config)
    embedded = ctx.record(None, "embed_out", weights.embed[tokens.long()])
    x_hc, pre_mix = entry_streams(embedded, ctx.config.hc_mult)
    x_hc, pre_mix = backbone(ctx, weights.layers, x_hc, pre_mix, parts)
    return ForwardOutput(final_logits(ctx, weights, x_hc, pre_mix), x_hc, pre_mix)


def check_tokens(tokens: Tensor, rows: int, config: ModelConfig) -> None:
    """`tokens` must be `rows` integers, each an id of the vocabulary."""
    if tokens.shape != (rows,) or tokens.dtype.is_floating_point or tokens.dtype == torch.bool:
        raise OperandError("tokens", (tokens.dtype, tuple(tokens.shape)), f"integers [{rows}], one for each packed row")
    outside = (tokens < 0) | (tokens >= config.vocab_size)
    if outside.any():
        row = int(outside.int().argmax())
        raise OperandError(f"tokens[{row}]", int(tokens[row]), f"an id from 0 to {config.vocab_size - 1}")


def backbone(
    ctx: ForwardContext, layers: Sequence[LayerWeights], x_hc: Tensor, pre_mix: Tensor, parts: int = 1
) -> tuple[Tensor, Tensor]:
    """Every layer in order; `layers` may load each one when it is asked for."""
    for layer in ctx.config.layers:
        x_hc, pre_mix = block(ctx, layer, layers[layer.layer_id], x_hc, pre_mix, parts)
    return x_hc, pre_mix


def boundary_logits(tokens: Tensor, weights: ModelWeights, config: ModelConfig) -> Tensor:
    """Embed, collapse, norm and head with no layer between: INT `[T]` -> FP32 `[T, V]`, the ends of the model alone.

    Raises:
        OperandError: an id outside the vocabulary.
    """
    check_tokens(tokens, len(tokens), config)
    collapsed = mhc_pre(*entry_streams(weights.embed[tokens.long()], config.hc_mult))
    return fp32_linear(rms_norm(collapsed, weights.norm, config.rms_norm_eps), weights.head)


def final_logits(ctx: ForwardContext, weights: ModelWeights, x_hc: Tensor, pre_mix: Tensor) -> Tensor:
    """Collapse with the last layer's pre-mix, norm, head: FP32 `[T, V]`."""
    collapsed = ctx.record(None, "final.collapsed", mhc_pre(x_hc, pre_mix))
    normed = ctx.record(None, "final.norm_out", rms_norm(collapsed, weights.norm, ctx.config.rms_norm_eps))
    return ctx.record(None, "logits", fp32_linear(normed, weights.head))
