"""All ranks inside one process and one thread, for laptops and tests.

Each rank is a greenlet that runs until it calls a collective; the collective completes when all members of its group
have arrived, and its results are computed then, before any member goes on. The order is fixed (ready ranks run first
come, first served, members are woken in rank order), so two runs are alike, and a hang is impossible: when no rank
can go on, the world says what each one waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from greenlet import GreenletExit, getcurrent, greenlet  # type: ignore[import-untyped]
from torch import Tensor

from v41_config import ParallelLayout, SlabError
from v41_model.collective_log import CollectiveKind, CollectiveLog, CollectiveRecord, Site
from v41_model.communicator import sum_in_rank_order
from v41_model.errors import RankError, WorldError

__all__ = ["LocalCommunicator", "LocalWorld"]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class _Arrival:
    """A rank standing at a collective: what it publishes, and how it will read what the members published."""

    kind: CollectiveKind
    site: Site
    group: range
    tensors: tuple[Tensor, ...]
    shapes: tuple[tuple[int, ...], ...]
    """What has to be equal on all members: full shapes, or only the trailing dimensions in a row all-to-all."""
    send_counts: tuple[int, ...]
    read: Callable[[Sequence[_Arrival]], tuple[Tensor, ...]]

    @property
    def contract(self) -> tuple[object, ...]:
        return (self.kind, self.site, self.shapes, tuple(t.dtype for t in self.tensors))

    def __str__(self) -> str:
        tensors = ", ".join(
            f"{list(s)} {str(t.dtype).removeprefix('torch.')}" for s, t in zip(self.shapes, self.tensors, strict=True)
        )
        return f"{self.kind.value} of {tensors} at {self.site} with ranks {self.group.start}..{self.group.stop - 1}"


class LocalWorld:
    """``world_size`` ranks in this process.

    ``layout`` is a :class:`~v41_config.ParallelLayout`; a plain integer means one TP group of that many ranks.
    The communicators, and with them the logs, live as long as the world.
    """

    def __init__(self, layout: ParallelLayout | int) -> None:
        self.layout = ParallelLayout(tp=layout, dp=1) if isinstance(layout, int) else layout
        self.communicators = [LocalCommunicator(self, rank) for rank in range(self.layout.world_size)]
        self.current_rank: int | None = None
        """The rank that is running, None outside of a run: for observers that all ranks share."""
        self._hub: greenlet | None = None
        self._waiting: dict[int, _Arrival] = {}

    @property
    def local_ranks(self) -> range:
        """The ranks that live in this process: all of them."""
        return range(self.layout.world_size)

    def run(
        self, rank_program: Callable[Concatenate[LocalCommunicator, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Run ``rank_program(communicator, *args, **kwargs)`` on every rank, in torch's inference mode.

        Returns the ranks' results in rank order.

        Errors: :class:`RankError` (with the rank and the original error as its cause) when a program raises; the
        other ranks are stopped where they wait. :class:`WorldError` when ranks meet with different collectives, or
        wait for ranks that have finished or stand elsewhere; it names every waiting rank and what it waits for.
        """
        if self._hub is not None:
            raise WorldError("LocalWorld.run", "a call from inside one of its own ranks", "one run at a time")
        results: dict[int, R] = {}
        failures: list[RankError] = []

        def body(communicator: LocalCommunicator) -> None:
            try:
                results[communicator.rank] = rank_program(communicator, *args, **kwargs)
            except Exception as error:
                failure = RankError(communicator.rank, error)
                failure.__cause__ = error
                failures.append(failure)

        self._hub = getcurrent()
        tasks = [greenlet(body, parent=self._hub) for _ in self.local_ranks]
        ready: deque[tuple[int, Any]] = deque((rank, self.communicators[rank]) for rank in self.local_ranks)
        try:
            with torch.inference_mode():
                while ready:
                    rank, value = ready.popleft()
                    self.current_rank = rank
                    tasks[rank].switch(value)
                    if failures:
                        raise failures[0]
                    if rank in self._waiting:
                        ready.extend(self._complete(self._waiting[rank].group))
            if self._waiting:
                raise self._stuck(results)
        finally:
            self._hub = self.current_rank = None
            self._waiting.clear()
            for task in tasks:
                if task:  # started and not finished: unwind it, so that its own cleanup runs
                    task.throw(GreenletExit)
        return [results[rank] for rank in self.local_ranks]

    def _complete(self, group: range) -> list[tuple[int, tuple[Tensor, ...]]]:
        """The members to wake with their results, when all of ``group`` have arrived; otherwise nobody."""
        arrivals = [self._waiting[rank] for rank in group if rank in self._waiting]
        if len(arrivals) < len(group) or any(a.group != group for a in arrivals):
            return []
        for rank, arrival in zip(group, arrivals, strict=True):
            if arrival.contract != arrivals[0].contract:
                raise WorldError(
                    "collective",
                    f"rank {rank} in {arrival}",
                    f"all members of the group in the same call as rank {group.start}: {arrivals[0]}",
                )
        woken = []
        for rank, arrival in zip(group, arrivals, strict=True):
            woken.append((rank, arrival.read(arrivals)))
            del self._waiting[rank]
        return woken

    def _stuck(self, results: dict[int, Any]) -> WorldError:
        waits = "; ".join(f"rank {rank} waits in {arrival}" for rank, arrival in sorted(self._waiting.items()))
        finished = f"; finished: {sorted(results)}" if results else ""
        return WorldError("LocalWorld", waits + finished, "every collective to be reached by all members of its group")

    def _meet(self, rank: int, arrival: _Arrival) -> tuple[Tensor, ...]:
        """Suspend the calling rank until its collective completes."""
        if self._hub is None:
            raise WorldError(f"rank {rank}", f"{arrival} outside of LocalWorld.run", "collectives only inside a run")
        self._waiting[rank] = arrival
        received: tuple[Tensor, ...] = self._hub.switch()
        return received


class LocalCommunicator:
    """A rank's :class:`~v41_model.communicator.Communicator` inside a :class:`LocalWorld`."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.layout = world.layout
        self.log = CollectiveLog()

    @property
    def ep_size(self) -> int:
        return self.layout.ep

    def all_gather_tokens(self, rows: Tensor, site: Site) -> Tensor:
        return self._gather(CollectiveKind.TOKEN_ALL_GATHER, rows, 0, site)

    def gather_logits(self, logits: Tensor, site: Site) -> Tensor:
        return self._gather(CollectiveKind.LOGITS_GATHER, logits, -1, site)

    def reduce_scatter_tokens(self, partial: Tensor, site: Site) -> Tensor:
        self._require_fp32(partial, site)
        if partial.shape[0] % self.layout.tp:
            raise SlabError(
                f"reduce_scatter_tokens at {site}", partial.shape[0], f"a multiple of tp={self.layout.tp} rows"
            )
        slab = partial.shape[0] // self.layout.tp
        start = self.layout.tp_rank(self.rank) * slab

        def read(members: Sequence[_Arrival]) -> tuple[Tensor, ...]:
            return (sum_in_rank_order([m.tensors[0][start : start + slab] for m in members]),)

        (result,) = self._tp_collective(CollectiveKind.TOKEN_REDUCE_SCATTER, partial, read, site)
        self._record(CollectiveKind.TOKEN_REDUCE_SCATTER, site, (partial,), (result,), members=self.layout.tp)
        return result

    def all_reduce(self, partial: Tensor, site: Site) -> Tensor:
        self._require_fp32(partial, site)

        def read(members: Sequence[_Arrival]) -> tuple[Tensor, ...]:
            return (sum_in_rank_order([m.tensors[0] for m in members]),)

        (result,) = self._tp_collective(CollectiveKind.ALL_REDUCE, partial, read, site)
        self._record(CollectiveKind.ALL_REDUCE, site, (partial,), (result,), members=self.layout.tp)
        return result

    def exchange_counts(self, send_counts: Tensor, site: Site) -> Tensor:
        kind = CollectiveKind.COUNTS_EXCHANGE
        if send_counts.dtype != torch.int64 or send_counts.shape != (self.ep_size,):
            found = f"{list(send_counts.shape)} {send_counts.dtype}"
            raise WorldError(f"exchange_counts at {site}", found, f"INT64 [{self.ep_size}]")

        def read(members: Sequence[_Arrival]) -> tuple[Tensor, ...]:
            return (torch.stack([m.tensors[0][self.rank] for m in members]),)

        group = range(self.ep_size)
        shapes = (tuple(send_counts.shape),)
        (received,) = self._world._meet(
            self.rank, _Arrival(kind, site, group, (send_counts,), shapes, send_counts=(), read=read)
        )
        self._record(kind, site, (send_counts,), (received,))
        return received

    def exchange_rows(
        self, columns: Sequence[Tensor], send_counts: Tensor, receive_counts: Tensor, site: Site
    ) -> tuple[Tensor, ...]:
        kind = CollectiveKind.ROW_ALL_TO_ALL
        sends, receives = tuple(send_counts.tolist()), tuple(receive_counts.tolist())
        if len(sends) != self.ep_size or any(c.shape[0] != sum(sends) for c in columns):
            rows = [c.shape[0] for c in columns]
            raise WorldError(
                f"exchange_rows at {site}",
                f"columns of {rows} rows",
                f"as many rows as the {self.ep_size} send counts {sends} add up to",
            )

        def read(members: Sequence[_Arrival]) -> tuple[Tensor, ...]:
            announced = tuple(m.send_counts[self.rank] for m in members)
            if announced != receives:
                raise WorldError(f"exchange_rows at {site}, rank {self.rank}", announced, f"the counts {receives}")
            starts = [sum(m.send_counts[: self.rank]) for m in members]
            return tuple(
                torch.cat([m.tensors[i][s : s + n] for m, s, n in zip(members, starts, announced, strict=True)])
                for i in range(len(columns))
            )

        shapes = tuple(tuple(c.shape[1:]) for c in columns)
        group = range(self.ep_size)
        received = self._world._meet(self.rank, _Arrival(kind, site, group, tuple(columns), shapes, sends, read))
        self._record(kind, site, columns, received)
        return received

    def _gather(self, kind: CollectiveKind, tensor: Tensor, dim: int, site: Site) -> Tensor:
        def read(members: Sequence[_Arrival]) -> tuple[Tensor, ...]:
            return (torch.cat([m.tensors[0] for m in members], dim=dim),)

        (result,) = self._tp_collective(kind, tensor, read, site)
        self._record(kind, site, (tensor,), (result,))
        return result

    def _tp_collective(
        self,
        kind: CollectiveKind,
        tensor: Tensor,
        read: Callable[[Sequence[_Arrival]], tuple[Tensor, ...]],
        site: Site,
    ) -> tuple[Tensor, ...]:
        group = self.layout.tp_group(self.rank)
        return self._world._meet(
            self.rank, _Arrival(kind, site, group, (tensor,), (tuple(tensor.shape),), send_counts=(), read=read)
        )

    def _record(
        self, kind: CollectiveKind, site: Site, sent: Sequence[Tensor], received: Sequence[Tensor], members: int = 1
    ) -> None:
        """Log a call; a sum reads a tensor of the result's size from each of ``members``."""
        self.log.add(
            CollectiveRecord(
                kind=kind,
                site=site,
                sent=tuple(tuple(t.shape) for t in sent),
                received=tuple(tuple(t.shape) for t in received),
                bytes_sent=sum(t.nbytes for t in sent),
                bytes_received=members * sum(t.nbytes for t in received),
            )
        )

    @staticmethod
    def _require_fp32(partial: Tensor, site: Site) -> None:
        if partial.dtype != torch.float32:
            raise WorldError(f"sum at {site}", partial.dtype, "FP32 partials, rounded only after the sum")
