"""Routed and shared experts (model.md section 14.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from v41_config.model_config import ModelConfig
from v41_goldens import exact
from v41_goldens.errors import ExpertError, OperandError
from v41_goldens.linear import dequantized_linear, quantized_linear
from v41_goldens.operand_shapes import check_shapes
from v41_goldens.quantisers import dequantize_activation, quantize_activation
from v41_goldens.weights import ExpertWeights


def swiglu(gate: Tensor, up: Tensor, limit: float, route_weight: Tensor | None = None) -> Tensor:
    """`silu(min(gate, limit)) * clamp(up, -limit, limit)`, times the route weight (model.md section 14.2).

    Args:
        gate, up: BF16 or FP32 `[..., I]`.
        route_weight: FP32, broadcastable to `[..., I]`; None for the shared expert.

    Returns:
        FP32 `[..., I]`; the caller rounds it to BF16, after the route weight and before w2.
    """
    z = exact.silu(gate.to(torch.float32).clamp_max(limit)) * up.to(torch.float32).clamp(-limit, limit)
    return z if route_weight is None else route_weight * z


def shared_expert(x: Tensor, weights: ExpertWeights, config: ModelConfig) -> Tensor:
    """The expert that every token takes, without route weight: BF16 `[T, D]` to BF16 `[T, D]`."""
    rows = _quantised_numbers(x)
    gate, up = (dequantized_linear(rows, w) for w in (weights.w1, weights.w3))
    return quantized_linear(swiglu(gate, up, config.swiglu_limit).to(torch.bfloat16), weights.w2)


def routed_experts(
    rows: Tensor, expert_ids: Tensor, route_weights: Tensor, experts: Mapping[int, ExpertWeights], config: ModelConfig
) -> Tensor:
    """Each row through its expert (model.md section 14.2).

    Rows are grouped by expert, so that every expert present is loaded once.

    Args:
        rows: BF16 `[R, D]`.
        expert_ids: `[R]` integers, global ids; a negative id marks an inactive row, whose result is zero.
        route_weights: FP32 `[R]`, applied to the SwiGLU result before its BF16 rounding.
        experts: weights of at least the experts that occur.

    Returns:
        BF16 `[R, D]` in the order of `rows`.

    Raises:
        ExpertError: a row's expert is not in `experts`.
        OperandError: not one id and one weight for each row.
    """
    check_shapes("routed_experts", rows=rows, row_expert_ids=expert_ids, row_route_weights=route_weights)
    return _through_experts(lambda active: _quantised_numbers(rows[active]), expert_ids, route_weights, experts, config)


def token_experts(
    x: Tensor, expert_ids: Tensor, route_weights: Tensor, experts: Mapping[int, ExpertWeights], config: ModelConfig
) -> Tensor:
    """Each token through its k experts: `routed_experts` of k rows for each, which are quantised once.

    Args:
        x: BF16 `[T, D]`.
        expert_ids, route_weights: `[T, k]`, as for `routed_experts`.

    Returns:
        BF16 `[T, k, D]`.

    Raises:
        ExpertError: an expert is not in `experts`.
        OperandError: `x` is no matrix, or not k ids and k weights for each token.
    """
    fits = x.dim() == expert_ids.dim() == 2 and len(x) == len(expert_ids)
    if not fits or route_weights.shape != expert_ids.shape:
        found = tuple(tuple(operand.shape) for operand in (x, expert_ids, route_weights))
        raise OperandError("token_experts x, expert_ids, route_weights", found, "[T, D] and twice [T, k]")
    k, tokens = expert_ids.shape[1], _quantised_numbers(x)
    ids, weights = expert_ids.flatten(), route_weights.flatten()
    result = _through_experts(lambda active: tokens[active // k], ids, weights, experts, config)
    return result.view(*expert_ids.shape, x.shape[1])


def _quantised_numbers(rows: Tensor) -> Tensor:
    """BF16 rows as quantising leaves them: in BF16 still, which holds every code times its scale."""
    return dequantize_activation(quantize_activation(rows)).to(torch.bfloat16)


def _through_experts(
    inputs: Callable[[Tensor], Tensor],
    expert_ids: Tensor,
    route_weights: Tensor,
    experts: Mapping[int, ExpertWeights],
    config: ModelConfig,
) -> Tensor:
    """`routed_experts` of rows that `inputs` gives by their indices, quantised and dequantised."""
    order = torch.argsort(expert_ids, stable=True)
    present, counts = torch.unique_consecutive(expert_ids[order], return_counts=True)
    groups = [group for group in zip(present.tolist(), counts.tolist(), strict=True) if group[0] >= 0]
    for expert_id, _ in groups:
        if expert_id not in experts:
            raise ExpertError("routed_experts expert_ids", expert_id, f"one of the {len(experts)} experts held here")
    weights = [experts[expert_id] for expert_id, _ in groups]
    sizes = [count for _, count in groups]
    order = order[len(order) - sum(sizes) :]  # inactive rows sort first
    rows = inputs(order)
    result = rows.new_zeros(len(expert_ids), rows.shape[1])
    if not groups:
        return result

    pairs = zip(rows.split(sizes), weights, strict=True)
    gate_up = [(dequantized_linear(x, w.w1), dequantized_linear(x, w.w3)) for x, w in pairs]
    gate, up = (torch.cat(parts) for parts in zip(*gate_up, strict=True))
    z = swiglu(gate, up, config.swiglu_limit, route_weights[order].unsqueeze(-1)).to(torch.bfloat16)
    hidden = _quantised_numbers(z).split(sizes)
    down = torch.cat([dequantized_linear(h, w.w2) for h, w in zip(hidden, weights, strict=True)])
    result[order] = down
    return result
