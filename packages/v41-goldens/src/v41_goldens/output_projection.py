"""From attention output back to the hidden width, as FP32 partials (model.md sections 13 and 18)."""

from __future__ import annotations

import torch
from torch import Tensor

from v41_config import ModelConfig
from v41_goldens.errors import OperandError
from v41_goldens.linear import quantized_linear_fp32
from v41_goldens.rope import apply_rope
from v41_goldens.weights import AttentionWeights


def grouped_output(
    o: Tensor, weights: AttentionWeights, rope_cos: Tensor, rope_sin: Tensor, config: ModelConfig
) -> Tensor:
    """Undo the rotation, then each group's projection: o BF16 `[T, H, head_dim]` -> BF16 `[T, groups * o_lora_rank]`.

    `wo_a` is used in BF16 (its decoded value is exact there) and its input is not quantised.
    """
    o = apply_rope(o, rope_cos, rope_sin, inverse=True)
    heads_per_group = config.num_attention_heads // config.o_groups
    grouped = o.unflatten(1, (-1, heads_per_group)).flatten(-2).transpose(0, 1)  # [groups, T, heads * head_dim]
    rank = config.o_lora_rank
    return torch.cat(
        [weights.wo_a.rows(g * rank, (g + 1) * rank).dot(x).bfloat16() for g, x in enumerate(grouped)], dim=-1
    )


def o_proj(u: Tensor, weights: AttentionWeights, config: ModelConfig, parts: int = 1) -> Tensor:
    """The row-parallel projection: u BF16 `[T, K]` -> FP32 `[T, D]`, not yet rounded to BF16.

    With `parts` > 1 the inputs are cut into that many TP ranks' shares, whose FP32 partials are added in rank
    order: what a tensor-parallel group computes, in one process.

    Raises:
        OperandError: `parts` does not cut the output groups evenly.
    """
    groups = weights.wo_b.shape[1] // config.o_lora_rank
    if parts < 1 or groups % parts:
        raise OperandError("o_proj parts", parts, f"a divisor of the {groups} output groups")
    width = u.shape[-1] // parts
    partials = (
        quantized_linear_fp32(u[:, start : start + width], weights.wo_b.columns(start, start + width))
        for start in range(0, u.shape[-1], width)
    )
    result = next(partials)
    for partial in partials:
        result = result + partial
    return result
