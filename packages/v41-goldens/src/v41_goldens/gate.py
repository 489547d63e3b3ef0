"""The router: which experts a token takes, and with what weight (model.md section 14.1)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from v41_config.model_config import ModelConfig
from v41_goldens import exact
from v41_goldens.errors import OperandError
from v41_goldens.linear import fp32_linear
from v41_goldens.operand_shapes import check_shapes

_WEIGHT_SUM_EPS = 1e-20
"""Added to the sum of the chosen scores, so that a token whose scores are all zero has weights of zero."""


class GateOutput(NamedTuple):
    """Routes of T tokens, k each; `ids` descend in biased score.

    Attributes:
        ids: INT32 `[T, k]`.
        weights: FP32 `[T, k]`, of the unbiased scores.
        biased_scores: FP32 `[T, E]`, what the choice was made from.
    """

    ids: Tensor
    weights: Tensor
    biased_scores: Tensor


def gate(x: Tensor, weight: Tensor, bias: Tensor, config: ModelConfig) -> GateOutput:
    """Choose the experts of each token (model.md section 14.1).

    Scores are `sqrt(softplus(logits))`; the bias counts for the choice only. Equal biased scores: lower id first.

    Args:
        x: BF16 `[T, D]`.
        weight: BF16 `[E, D]`.
        bias: FP32 `[E]`.

    Raises:
        OperandError: shapes that do not fit together, or a biased score that is NaN, which has no place in an order.
    """
    check_shapes("gate", x=x, gate_weight=weight, gate_bias=bias)
    scores = exact.sqrt(exact.softplus(fp32_linear(x, weight)))
    biased_scores = scores + bias
    unknown = biased_scores.isnan().any(dim=1)
    if unknown.any():
        raise OperandError(f"gate scores[{int(unknown.int().argmax())}]", "a NaN", "a number for every expert")
    order = torch.sort(biased_scores, dim=-1, descending=True, stable=True).indices
    chosen = order[:, : config.num_experts_per_tok]
    selected = scores.gather(1, chosen)
    weights = selected / (exact.total(selected, 1, keepdim=True) + _WEIGHT_SUM_EPS) * config.routed_scaling_factor
    return GateOutput(chosen.to(torch.int32), weights, biased_scores)
