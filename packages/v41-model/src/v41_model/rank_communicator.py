"""The collectives of one rank, apart from how bytes get from rank to rank: checks, sums in rank order, the log.

Every collective is one of two movements: each member reads everything that the others publish, or each member sends
some rows to every other one. A world brings only these (:meth:`RankCommunicator._move`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from v41_config import ParallelLayout, SlabError
from v41_model.collective_log import CollectiveKind, CollectiveLog, CollectiveRecord, Site
from v41_model.communicator import sum_in_rank_order
from v41_model.errors import WorldError

__all__ = ["CollectiveCall", "Moved", "Parts", "RankCommunicator"]

Parts = Sequence[tuple[Tensor, ...]]
"""What a rank reads from each member of the group, in rank order: one tensor per column. Views, to be copied."""


@dataclass(frozen=True)
class RowCounts:
    """Rows for and from each member of a row exchange."""

    send: tuple[int, ...]
    receive: tuple[int, ...]


@dataclass(frozen=True)
class CollectiveCall:
    """A rank standing at a collective: what it publishes, to whom, and what has to be equal on all members.

    ``columns`` are read whole by every member, or, where there are ``counts``, cut into that many rows for each.
    """

    kind: CollectiveKind
    site: Site
    group: range
    columns: tuple[Tensor, ...]
    counts: RowCounts | None = None

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Full shapes, but only the trailing dimensions where every member brings another number of rows."""
        first = 1 if self.kind is CollectiveKind.ROW_ALL_TO_ALL else 0
        return tuple(tuple(t.shape[first:]) for t in self.columns)

    @property
    def contract(self) -> tuple[object, ...]:
        """What must be equal on all members of the group."""
        return (self.kind, self.site, self.shapes, tuple(t.dtype for t in self.columns))

    def __str__(self) -> str:
        tensors = ", ".join(
            f"{list(s)} {str(t.dtype).removeprefix('torch.')}" for s, t in zip(self.shapes, self.columns, strict=True)
        )
        return f"{self.kind.value} of {tensors} at {self.site} with ranks {self.group.start}..{self.group.stop - 1}"

    def require_announced(self, rank: int, announced: tuple[int, ...]) -> None:
        """Errors: :class:`WorldError` when members send other numbers of rows than ``rank`` expects."""
        assert self.counts is not None
        if announced != self.counts.receive:
            where = f"{self.kind.value} at {self.site}, rank {rank}"
            raise WorldError(where, announced, f"the counts {self.counts.receive}")


@dataclass(frozen=True)
class Moved:
    """A collective that has completed: this rank's results, the bytes it read for them, the seconds that took."""

    results: tuple[Tensor, ...]
    bytes_received: int
    seconds: float


class RankCommunicator(ABC):
    """A rank's :class:`~v41_model.communicator.Communicator` in any world."""

    def __init__(self, layout: ParallelLayout, rank: int) -> None:
        self.rank = rank
        self.layout = layout
        self.log = CollectiveLog()

    @abstractmethod
    def _move(self, call: CollectiveCall, finish: Callable[[Parts], tuple[Tensor, ...]]) -> Moved:
        """Wait for the members and give ``finish`` their parts; its results share no memory with them.

        Errors: :class:`WorldError` when members meet in different calls, or will not arrive.
        """

    @property
    def ep_size(self) -> int:
        return self.layout.ep

    def all_gather_tokens(self, rows: Tensor, site: Site) -> Tensor:
        return self._gather(CollectiveKind.TOKEN_ALL_GATHER, rows, 0, site)

    def gather_logits(self, logits: Tensor, site: Site) -> Tensor:
        return self._gather(CollectiveKind.LOGITS_GATHER, logits, -1, site)

    def reduce_scatter_tokens(self, partial: Tensor, site: Site) -> Tensor:
        kind, tp = CollectiveKind.TOKEN_REDUCE_SCATTER, self.layout.tp
        self._require_partials(partial, kind, site)
        if partial.shape[0] % tp:
            raise SlabError(f"{kind.value} at {site}", partial.shape[0], f"a multiple of tp={tp} rows")
        slabs = (partial.shape[0] // tp,) * tp
        return self._tp_collective(kind, partial, site, _sum, RowCounts(slabs, slabs))

    def all_reduce(self, partial: Tensor, site: Site) -> Tensor:
        self._require_partials(partial, CollectiveKind.ALL_REDUCE, site)
        return self._tp_collective(CollectiveKind.ALL_REDUCE, partial, site, _sum)

    def exchange_counts(self, send_counts: Tensor, site: Site) -> Tensor:
        kind = CollectiveKind.COUNTS_EXCHANGE
        self._require_counts(send_counts, kind, site)
        each = (1,) * self.ep_size
        call = CollectiveCall(kind, site, range(self.ep_size), (send_counts,), RowCounts(each, each))
        (received,) = self._collective(call, _concatenate)
        return received

    def exchange_rows(
        self, columns: Sequence[Tensor], send_counts: Tensor, receive_counts: Tensor, site: Site
    ) -> tuple[Tensor, ...]:
        kind = CollectiveKind.ROW_ALL_TO_ALL
        self._require_counts(send_counts, kind, site)
        self._require_counts(receive_counts, kind, site)
        counts = RowCounts(tuple(send_counts.tolist()), tuple(receive_counts.tolist()))
        if not columns or any(c.dim() == 0 or c.shape[0] != sum(counts.send) for c in columns):
            shapes = [list(c.shape) for c in columns]
            expected = f"as many rows as the {self.ep_size} send counts {counts.send} add up to"
            raise WorldError(f"{kind.value} at {site}", f"columns of {shapes}", expected)
        return self._collective(CollectiveCall(kind, site, range(self.ep_size), tuple(columns), counts), _concatenate)

    def _gather(self, kind: CollectiveKind, tensor: Tensor, dim: int, site: Site) -> Tensor:
        self._require_rows(tensor, kind, site)
        return self._tp_collective(kind, tensor, site, lambda parts: (torch.cat([p for (p,) in parts], dim=dim),))

    def _tp_collective(
        self,
        kind: CollectiveKind,
        tensor: Tensor,
        site: Site,
        finish: Callable[[Parts], tuple[Tensor, ...]],
        counts: RowCounts | None = None,
    ) -> Tensor:
        group = self.layout.tp_group(self.rank)
        (result,) = self._collective(CollectiveCall(kind, site, group, (tensor,), counts), finish)
        return result

    def _collective(self, call: CollectiveCall, finish: Callable[[Parts], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        moved = self._move(call, finish)
        self.log.add(
            CollectiveRecord(
                kind=call.kind,
                site=call.site,
                sent=tuple(tuple(t.shape) for t in call.columns),
                received=tuple(tuple(t.shape) for t in moved.results),
                bytes_sent=sum(t.nbytes for t in call.columns),
                bytes_received=moved.bytes_received,
                seconds=moved.seconds,
            )
        )
        return moved.results

    def _require_counts(self, counts: Tensor, kind: CollectiveKind, site: Site) -> None:
        if counts.dtype != torch.int64 or counts.shape != (self.ep_size,):
            found = f"{list(counts.shape)} {counts.dtype}"
            raise WorldError(f"{kind.value} at {site}", found, f"counts, INT64 [{self.ep_size}]")
        if bool((counts < 0).any()):
            raise WorldError(f"{kind.value} at {site}", counts.tolist(), "counts of at least 0 rows")

    @staticmethod
    def _require_rows(tensor: Tensor, kind: CollectiveKind, site: Site) -> None:
        if tensor.dim() == 0:
            raise WorldError(f"{kind.value} at {site}", "a tensor without dimensions", "rows, [R, ...]")

    @classmethod
    def _require_partials(cls, partial: Tensor, kind: CollectiveKind, site: Site) -> None:
        cls._require_rows(partial, kind, site)
        if partial.dtype != torch.float32:
            raise WorldError(f"{kind.value} at {site}", partial.dtype, "FP32 partials, rounded only after the sum")


def _sum(parts: Parts) -> tuple[Tensor, ...]:
    return (sum_in_rank_order([partial for (partial,) in parts]),)


def _concatenate(parts: Parts) -> tuple[Tensor, ...]:
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))
