"""The transports between ranks as plain functions over lists with one tensor for each rank (model.md section 18).

What a communicator does over a network, this does to lists, in rank order and in FP32 where it adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from v41_config import ModelConfig, ParallelLayout
from v41_goldens.errors import ExpertError, OperandError


def all_gather_tokens(slabs: Sequence[Tensor]) -> Tensor:
    """The slabs of a TP group, active rows alone, one behind the other: `[T, ...]`."""
    return torch.cat(list(slabs))


def all_reduce(partials: Sequence[Tensor]) -> Tensor:
    """FP32 partials of a TP group, added in rank order."""
    total = partials[0].clone()
    for partial in partials[1:]:
        total += partial
    return total


def reduce_scatter_tokens(partials: Sequence[Tensor], slab_rows: int) -> list[Tensor]:
    """`all_reduce`, of which each rank keeps the active rows of its slab: `[at most slab_rows, ...]` each."""
    total = all_reduce(partials)
    return [total[rank * slab_rows : (rank + 1) * slab_rows] for rank in range(len(partials))]


def gather_vocabulary(shards: Sequence[Tensor]) -> Tensor:
    """Logits `[R, V_local]` of a TP group's vocabulary ranges side by side: `[R, V]`."""
    return torch.cat(list(shards), dim=1)


def exchange_rows(sent: Sequence[Tensor], counts: Tensor) -> list[Tensor]:
    """Each rank sends `counts[rank, destination]` rows, grouped by destination; it receives them by source rank."""
    parts = [rows.split(counts[rank].tolist()) for rank, rows in enumerate(sent)]
    return [torch.cat([part[destination] for part in parts]) for destination in range(len(sent))]


@dataclass(frozen=True)
class Dispatched:
    """What one rank's experts receive, and what returns their results (see the operator `dispatch`).

    `rows` BF16 `[R, D]`, `expert_ids` INT32 `[R]` and `route_weights` FP32 `[R]` by source rank; `assignment_order`
    INT64 `[T_local * k]`, its own assignments in the order they left in; `send_counts`, `receive_counts` INT64 `[EP]`.
    """

    rows: Tensor
    expert_ids: Tensor
    route_weights: Tensor
    assignment_order: Tensor
    send_counts: Tensor
    receive_counts: Tensor


class RankSimulator:
    """All ranks of a layout in one process. `config` says which expert stands where."""

    def __init__(self, config: ModelConfig, layout: ParallelLayout) -> None:
        layout.check(config)
        self.config, self.layout = config, layout
        self._experts_of_rank = config.n_routed_experts // layout.ep

    def tp_groups(self) -> list[range]:
        """The ranks of each TP group."""
        return [self.layout.tp_group(group * self.layout.tp) for group in range(self.layout.dp)]

    def dispatch(
        self, x: Sequence[Tensor], expert_ids: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> list[Dispatched]:
        """Send each rank's rows BF16 `[n, D]` to the owners of their experts, ids and weights `[n, k]` with them.

        Raises:
            ExpertError: an id outside the model; ids of -1 are not refused here alone, so padding is left out before.
        """
        self._require_every_rank(x)
        orders, counts = [], []
        for rank, ids in enumerate(expert_ids):
            flat = ids.flatten().long()
            outside = (flat < 0) | (flat >= self.config.n_routed_experts)
            if outside.any():
                raise ExpertError(f"dispatch expert_ids of rank {rank}", int(flat[outside][0]),
                                  f"an expert from 0 to {self.config.n_routed_experts - 1}")  # fmt: skip
            owner = flat // self._experts_of_rank
            orders.append(torch.argsort(owner, stable=True))
            counts.append(torch.bincount(owner, minlength=self.layout.ep))
        sent = torch.stack(counts)
        k = expert_ids[0].shape[1]
        columns = (
            [rows[order // k] for rows, order in zip(x, orders, strict=True)],
            [ids.flatten()[order] for ids, order in zip(expert_ids, orders, strict=True)],
            [part.flatten()[order] for part, order in zip(weights, orders, strict=True)],
        )
        rows, received_ids, received_weights = (exchange_rows(column, sent) for column in columns)
        return [
            Dispatched(rows[rank], received_ids[rank], received_weights[rank], orders[rank], sent[rank], sent[:, rank])
            for rank in range(self.layout.ep)
        ]

    def return_to_source(
        self, outputs: Sequence[Tensor], orders: Sequence[Tensor], send_counts: Sequence[Tensor]
    ) -> list[Tensor]:
        """Expert results BF16 `[R, D]` back to their tokens: `[n * k, D]` for each rank, in the order of its routes."""
        self._require_every_rank(outputs)
        returned = exchange_rows(outputs, torch.stack(list(send_counts)).T.contiguous())
        restored = [torch.empty_like(rows) for rows in returned]
        for rows, order, back in zip(restored, orders, returned, strict=True):
            rows[order] = back
        return restored

    def _require_every_rank(self, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self.layout.ep:
            raise OperandError("RankSimulator", f"{len(tensors)} ranks", f"all {self.layout.ep} ranks of {self.layout}")
