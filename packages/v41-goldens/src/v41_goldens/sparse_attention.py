"""Attention over a per-token list of rows, with a sink, in chunks of 64 (model.md section 12, rule E4)."""

from __future__ import annotations

import torch
from torch import Tensor

from v41_goldens.errors import OperandError
from v41_goldens.exact import dot, exp, total

CHUNK = 64
"""Entries of the index list that share one running maximum update."""

LOWEST_MAXIMUM = -1e30
"""The running maximum before the first entry; finite, so that an empty row meets no inf - inf."""


def sparse_attention(q: Tensor, kv: Tensor, valid: Tensor, sink: Tensor, scale: float) -> Tensor:
    """Attend each token to its own list of entries.

    Args:
        q: BF16 `[T, H, head_dim]`, rotated.
        kv: BF16 `[T, N, head_dim]`, keys and values at once, in list order.
        valid: bool `[T, N]`; other entries count for nothing, whatever their bytes.
        sink: FP32 `[H]`, added to the denominator as `exp(sink - maximum)` after the last chunk.
        scale: the softmax scale, used in FP32.

    Returns:
        BF16 `[T, H, head_dim]`; a row without a valid entry is zero, whatever the sink. Probabilities are rounded to
        BF16 before the product with the values, not in the denominator.

    Raises:
        OperandError: shapes that do not fit together.
    """
    check_operands(q, kv, valid, sink)
    tokens, heads, width = q.shape
    maximum = torch.full((tokens, heads, 1), LOWEST_MAXIMUM, dtype=torch.float32, device=q.device)
    denominator = torch.zeros_like(maximum)
    accumulator = torch.zeros(tokens, heads, width, dtype=torch.float32, device=q.device)
    scale_fp32 = torch.tensor(scale, dtype=torch.float32, device=q.device)
    for start in range(0, valid.shape[1], CHUNK):
        kv_chunk, valid_chunk = kv[:, start : start + CHUNK], valid[:, start : start + CHUNK]
        if not valid_chunk.any():
            continue  # it would multiply by 1 and add +0, which changes no bit: an accumulator is never -0
        live = valid_chunk.unsqueeze(1)
        values = torch.where(valid_chunk.unsqueeze(-1), kv_chunk, torch.zeros_like(kv_chunk))
        scores = torch.where(live, dot(q, values) * scale_fp32, -torch.inf)
        newest = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        decay, p = exp(maximum - newest), exp(scores - newest)
        denominator = denominator * decay + total(p, dim=-1, keepdim=True)
        accumulator = accumulator * decay + dot(p.bfloat16(), values.transpose(-1, -2))
        maximum = newest
    denominator = denominator + exp(sink.view(-1, 1) - maximum)
    # An empty row has only the sink to divide by, and a sink of -inf is 0.
    empty = ~valid.any(dim=1)
    return (accumulator / denominator).masked_fill_(empty[:, None, None], 0.0).bfloat16()


def check_operands(q: Tensor, kv: Tensor, valid: Tensor, sink: Tensor) -> None:
    """The shapes of `sparse_attention`'s operands, or an `OperandError`."""
    if kv.shape != (q.shape[0], valid.shape[1], q.shape[2]) or len(valid) != len(q) or sink.shape != (q.shape[1],):
        raise OperandError("sparse_attention", tuple(tuple(t.shape) for t in (q, kv, valid, sink)),
                           "q [T, H, head_dim], kv [T, N, head_dim], valid [T, N], sink [H]")  # fmt: skip
