"""MoE over the EP group: counts exchange, dispatch, local experts, combine at the source (model.md section 14).

Every rank holds different tokens and some of the experts. Nothing here knows how attention shares its work: there is
no TP rank and no list of token owners, because a row that enters is a row of this rank and is routed once. A rank
without tokens still takes part in all three collectives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from v41_config import LayoutError, ModelConfig, ParallelLayout
from v41_goldens.gate import GateOutput
from v41_goldens.rank_simulator import Dispatched
from v41_goldens.weights import MoeWeights
from v41_model.collective_log import Site
from v41_model.communicator import ExpertCommunicator
from v41_model.operator_checks import checked
from v41_model.operators import Operators

__all__ = ["Dispatched", "ExpertParallelOutput", "dispatch", "expert_owners", "expert_parallel_moe", "return_to_source"]


def expert_owners(config: ModelConfig, layout: ParallelLayout, device: torch.device | str = "cpu") -> Tensor:
    """INT64 ``[E]``: the EP rank that holds each routed expert."""
    owners = torch.empty(config.n_routed_experts, dtype=torch.int64, device=device)
    for rank in range(layout.ep):
        held = layout.expert_range(config, rank)
        owners[held.start : held.stop] = rank
    return owners


def dispatch(
    x: Tensor, routes: GateOutput, owners: Tensor, communicator: ExpertCommunicator, layer: int | None = None
) -> Dispatched:
    """Send each token's row to the owners of its experts, with expert id and route weight (phases 1 and 2).

    ``x`` BF16 ``[n, D]`` are this rank's active rows, ``routes`` has ids and weights ``[n, k]``. Counts travel first,
    then exactly that many rows: one per assignment, so a token that chose two experts of a rank is sent twice.

    Errors: :class:`v41_config.LayoutError` for an expert id outside the model, before anything is sent.
    """
    expert_ids = routes.ids.flatten()
    known = (expert_ids >= 0) & (expert_ids < len(owners))
    if not bool(known.all()):
        wrong = int(expert_ids[~known][0])
        raise LayoutError("dispatch", f"expert id {wrong}", f"0 <= id < n_routed_experts = {len(owners)}")
    destinations = owners[expert_ids.long()]
    order = torch.argsort(destinations, stable=True)
    send_counts = torch.bincount(destinations, minlength=communicator.ep_size)
    receive_counts = communicator.exchange_counts(send_counts, Site("expert counts", layer))
    choices = routes.ids.shape[1]
    columns = (x[order // choices], expert_ids[order], routes.weights.flatten()[order])
    rows, ids, weights = communicator.exchange_rows(
        columns, send_counts, receive_counts, Site("expert dispatch", layer)
    )
    return Dispatched(rows, ids, weights, order, send_counts, receive_counts)


def return_to_source(
    outputs: Tensor, dispatched: Dispatched, communicator: ExpertCommunicator, layer: int | None = None
) -> Tensor:
    """Send expert outputs BF16 ``[R, D]`` back (phase 3): BF16 ``[n * k, D]`` in the order of this rank's routes."""
    (returned,) = communicator.exchange_rows(
        (outputs,), dispatched.receive_counts, dispatched.send_counts, Site("expert combine", layer)
    )
    restored = torch.empty_like(returned)
    restored[dispatched.assignment_order] = returned
    return restored


@dataclass(frozen=True)
class ExpertParallelOutput:
    """The MoE result ``out`` BF16 ``[n, D]`` with what led to it: routes, shared expert alone, rows received."""

    out: Tensor
    shared: Tensor
    routes: GateOutput
    received_rows: int


def expert_parallel_moe(
    x: Tensor,
    weights: MoeWeights,
    owners: Tensor,
    config: ModelConfig,
    communicator: ExpertCommunicator,
    operators: Operators,
    layer: int | None = None,
) -> ExpertParallelOutput:
    """MoE of this rank's rows ``x`` BF16 ``[n, D]``, n may be 0; ``weights`` hold the gate, the shared expert and the
    experts of this rank.

    The owner multiplies the route weight into the SwiGLU result before its BF16 cast and w2; rows return as BF16 and
    are summed unweighted in FP32 by ascending expert id, plus the shared expert, rounded once (model.md 14.3).

    Errors: :class:`v41_config.OperatorError` naming an operator whose output has another shape or dtype.
    """
    routes = operators.gate(x, weights.gate, weights.gate_bias, config)
    chosen = (len(x), config.num_experts_per_tok)
    checked("gate ids", routes.ids, chosen, torch.int32)
    checked("gate weights", routes.weights, chosen, torch.float32)
    received = dispatch(x, routes, owners, communicator, layer)
    outputs = operators.routed_experts(
        received.rows, received.expert_ids, received.route_weights, weights.experts, config
    )
    checked("routed_experts", outputs, received.rows.shape)
    returned = return_to_source(outputs, received, communicator, layer)
    shared = checked("shared_expert", operators.shared_expert(x, weights.shared, config), x.shape)
    expert_rows = returned.unflatten(0, routes.ids.shape)
    out = checked("combine", operators.combine(expert_rows, routes.ids, shared), x.shape)
    return ExpertParallelOutput(out, shared, routes, received_rows=len(received.rows))
