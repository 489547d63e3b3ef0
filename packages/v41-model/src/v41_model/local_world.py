"""All ranks inside one process and one thread, for laptops and tests.

Each rank is a greenlet that runs until it calls a collective; the collective completes when all members of its group
have arrived, and its results are computed then, before any member goes on. The order is fixed (ready ranks run first
come, first served, members are woken in rank order), so two runs are alike, and a hang is impossible: when no rank
can go on, the world says what each one waits for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from greenlet import GreenletExit, getcurrent, greenlet  # type: ignore[import-untyped]
from torch import Tensor

from v41_config import ParallelLayout
from v41_model.communicator import Communicator
from v41_model.errors import RankError, WorldError
from v41_model.rank_communicator import CollectiveCall, Moved, Parts, RankCommunicator

__all__ = ["LocalCommunicator", "LocalWorld"]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class _Arrival:
    """A rank standing at a collective, and how it will read what the members published."""

    call: CollectiveCall
    finish: Callable[[Parts], tuple[Tensor, ...]]


class LocalWorld:
    """``world_size`` ranks in this process.

    ``layout`` is a :class:`~v41_config.ParallelLayout`; a plain integer means one TP group of that many ranks.
    The communicators, and with them the logs, live as long as the world.
    """

    def __init__(self, layout: ParallelLayout | int) -> None:
        self.layout = ParallelLayout(tp=layout, dp=1) if isinstance(layout, int) else layout
        self.communicators = [LocalCommunicator(self, rank) for rank in range(self.layout.world_size)]
        self.current_rank: int | None = None
        self._hub: greenlet | None = None
        self._waiting: dict[int, _Arrival] = {}

    @property
    def local_ranks(self) -> range:
        """The ranks that live in this process: all of them."""
        return range(self.layout.world_size)

    def run(
        self, rank_program: Callable[Concatenate[Communicator, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Run ``rank_program(communicator, *args, **kwargs)`` on every rank, in torch's inference mode.

        Returns the ranks' results in rank order.

        Errors: :class:`RankError` (with the rank and the original error as its cause) when a program raises or
        leaves, by ``sys.exit`` say; the other ranks are stopped where they wait. :class:`WorldError` when ranks meet
        with different collectives, or wait for ranks that have finished or stand elsewhere; it names every waiting
        rank and what it waits for.
        """
        if self._hub is not None:
            raise WorldError("LocalWorld.run", "a call from inside one of its own ranks", "one run at a time")
        results: dict[int, R] = {}
        failures: list[RankError] = []

        def body(communicator: LocalCommunicator) -> None:
            try:
                results[communicator.rank] = rank_program(communicator, *args, **kwargs)
            except (Exception, GreenletExit, SystemExit) as error:  # an exit would pass for a rank that finished
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
                        ready.extend(self._complete(self._waiting[rank].call.group))
            if self._waiting:
                raise self._stuck(results)
        finally:
            self._hub = self.current_rank = None
            self._waiting.clear()
            for task in tasks:
                if task:  # started and not finished: unwind it, so that its own cleanup runs
                    task.throw(GreenletExit)
        return [results[rank] for rank in self.local_ranks]

    def _complete(self, group: range) -> list[tuple[int, Moved]]:
        """The members to wake with their results, when all of ``group`` have arrived; otherwise nobody."""
        arrivals = [self._waiting[rank] for rank in group if rank in self._waiting]
        if len(arrivals) < len(group) or any(a.call.group != group for a in arrivals):
            return []
        calls = [arrival.call for arrival in arrivals]
        for rank, call in zip(group, calls, strict=True):
            if call.contract != calls[0].contract:
                raise WorldError(
                    "collective",
                    f"rank {rank} in {call}",
                    f"all members of the group in the same call as rank {group.start}: {calls[0]}",
                )
        woken = []
        for place, (rank, arrival) in enumerate(zip(group, arrivals, strict=True)):
            began = time.perf_counter()
            parts = _parts(calls, place, rank)
            results = arrival.finish(parts)
            received = sum(t.nbytes for part in parts for t in part)
            woken.append((rank, Moved(results, received, time.perf_counter() - began)))
        for rank in group:
            del self._waiting[rank]
        return woken

    def _stuck(self, results: dict[int, Any]) -> WorldError:
        waits = "; ".join(f"rank {rank} waits in {a.call}" for rank, a in sorted(self._waiting.items()))
        finished = f"; finished: {sorted(results)}" if results else ""
        return WorldError("LocalWorld", waits + finished, "every collective to be reached by all members of its group")

    def _meet(self, rank: int, arrival: _Arrival) -> Moved:
        """Suspend the calling rank until its collective completes."""
        if self._hub is None:
            raise WorldError(f"rank {rank}", f"{arrival.call} outside of LocalWorld.run", "collectives only in a run")
        self._waiting[rank] = arrival
        moved: Moved = self._hub.switch()
        return moved


class LocalCommunicator(RankCommunicator):
    """A rank's :class:`~v41_model.communicator.Communicator` inside a :class:`LocalWorld`."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        super().__init__(world.layout, rank)
        self._world = world

    def _move(self, call: CollectiveCall, finish: Callable[[Parts], tuple[Tensor, ...]]) -> Moved:
        return self._world._meet(self.rank, _Arrival(call, finish))


def _parts(calls: list[CollectiveCall], place: int, rank: int) -> Parts:
    """What the member at ``place`` in the group, ``rank`` of the world, reads from each member."""
    if calls[place].counts is None:
        return [call.columns for call in calls]
    sends = [call.counts.send for call in calls if call.counts is not None]
    announced = tuple(send[place] for send in sends)
    calls[place].require_announced(rank, announced)
    starts = [sum(send[:place]) for send in sends]
    return [
        tuple(column[start : start + count] for column in call.columns)
        for call, start, count in zip(calls, starts, announced, strict=True)
    ]
