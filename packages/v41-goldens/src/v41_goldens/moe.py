"""The mixture-of-experts sublayer (model.md section 14)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from v41_config.model_config import ModelConfig
from v41_goldens.experts import shared_expert, token_experts
from v41_goldens.gate import gate
from v41_goldens.operand_shapes import check_shapes
from v41_goldens.weights import MoeWeights


def combine(expert_rows: Tensor, expert_ids: Tensor, shared: Tensor) -> Tensor:
    """Sum a token's expert results and its shared expert (model.md section 14.3, E7).

    Args:
        expert_rows: BF16 `[T, k, D]`, already weighted.
        expert_ids: `[T, k]` integers; rows with a negative id are left out, whatever they hold.
        shared: BF16 `[T, D]`.

    Returns:
        BF16 `[T, D]`: FP32 sum in ascending expert id, then the shared expert, one rounding.
    """
    check_shapes("combine", expert_rows=expert_rows, expert_ids=expert_ids, shared=shared)
    ids, order = torch.sort(expert_ids, dim=1)
    token = torch.arange(len(ids), device=ids.device)
    result = torch.zeros(shared.shape, dtype=torch.float32, device=shared.device)
    for place, inactive in zip(order.unbind(1), (ids < 0).unbind(1), strict=True):
        result += expert_rows[token, place].masked_fill_(inactive.unsqueeze(-1), 0.0)
    return result.add_(shared).to(torch.bfloat16)


def moe(
    x: Tensor, weights: MoeWeights, config: ModelConfig, record: Callable[[str, Tensor], object] | None = None
) -> Tensor:
    """Gate, experts and combination for tokens whose experts are all here (model.md section 14).

    Args:
        x: BF16 `[T, D]`, the normalised FFN input.
        record: called with the name and value of the routes and of the shared expert's part.

    Returns:
        BF16 `[T, D]`.
    """
    routes = gate(x, weights.gate, weights.gate_bias, config)
    shared = shared_expert(x, weights.shared, config)
    if record is not None:
        record("router_ids", routes.ids)
        record("router_weights", routes.weights)
        record("router_score_plus_bias", routes.biased_scores)
        record("shared_out", shared)
    rows = token_experts(x, routes.ids, routes.weights, weights.experts, config)
    return combine(rows, routes.ids, shared)
