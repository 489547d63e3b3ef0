"""Signs of life of ranks in other processes, and the first failure of any, over torch.distributed's store.

A backend tells a rank little about the others: a gloo collective whose member was killed breaks on its neighbours
only, and one whose member raised waits for its timeout. Here a thread of each process bumps a counter in the store
and reads everybody's; a counter that stands still is a rank that is gone, and a rank that raises leaves its error.
The first failure wins, so that all ranks report the same one.
"""

from __future__ import annotations

import json
import threading
import time
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from v41_model.errors import RankError

__all__ = ["RankWatch"]

INTERVAL = 0.5
"""Seconds between two signs of life."""

SILENCE_AFTER_BREAK = 6 * INTERVAL
"""How long a rank may be silent once a connection is known to be broken."""

LINGER = 4 * INTERVAL
"""How long the rank that keeps the store stays after a failure, for the others to read of it."""

_FAILURE = "failure"


class RankWatch:
    """Rank ``rank``'s view of the ``world_size`` ranks that share ``store``.

    ``silence`` is how many seconds a rank may give no sign of life; ``store_rank`` the rank whose process keeps the
    store, None where something else does.
    """

    def __init__(self, store: Store, rank: int, world_size: int, *, silence: float, store_rank: int | None) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._silence, self._store_rank = silence, store_rank
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._left: frozenset[int] = frozenset()
        self._failure: RankError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)

    def start(self, timeout: float) -> None:
        """Wait until all ranks have shown up, then watch. Errors: torch's ``DistStoreError``."""
        self._store.set(_alive(self._rank), "0")
        self._store.wait([_alive(rank) for rank in range(self._world_size)], timedelta(seconds=timeout))
        self._thread.start()

    @property
    def failure(self) -> RankError | None:
        """The world's first failure, as far as this process knows."""
        return self._failure

    def report(self, rank: int, error: BaseException | str) -> RankError:
        """Tell all ranks that ``rank`` failed; the failure that was reported first, if not this one."""
        own = RankError(rank, error)
        if self._failure is None:
            notice = json.dumps({"rank": rank, "error": own.found})
            try:
                first = self._store.compare_set(_FAILURE, "", notice).decode()
            except RuntimeError:  # the store is gone: nobody can be told, nor tells
                first = notice
            self._failure = own if first == notice else _read(first)
        return self._failure

    def explain(self, error: BaseException) -> RankError:
        """The failure behind a broken connection: one that was reported, a rank that is gone, or the error itself."""
        deadline = time.monotonic() + self._silence
        while self._failure is None and time.monotonic() < deadline:
            gone = self._silent(min(self._silence, SILENCE_AFTER_BREAK))
            if gone:
                return self.report(gone[0], "its process has ended: connection lost, no sign of life")
            time.sleep(INTERVAL / 2)
        if self._failure is None and self._left:
            return self.report(min(self._left), "it has left the world while others wait for it")
        return self._failure or self.report(self._rank, error)

    def leave(self, timeout: float) -> None:
        """End the watch. The rank that keeps the store stays until everybody has left, at most ``timeout`` seconds."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            self._store.set(_gone(self._rank), "1")
            if self._rank == self._store_rank:
                longest = timeout if self._failure is None else min(timeout, LINGER)
                self._store.wait([_gone(rank) for rank in range(self._world_size)], timedelta(seconds=longest))
        except RuntimeError:
            return  # some never leave, or the store is gone: nobody to wait for

    def _silent(self, seconds: float) -> list[int]:
        now = time.monotonic()
        return [r for r, (_, when) in self._seen.items() if now - when > seconds and r not in self._left]

    def _watch(self) -> None:
        store = self._store
        ranks = range(self._world_size)
        beats = 0
        while not self._stop.wait(INTERVAL):
            beats += 1
            try:
                store.set(_alive(self._rank), str(beats))
                counters = [store.get(_alive(rank)) for rank in ranks]
                left = frozenset(rank for rank in ranks if store.check([_gone(rank)]))
                failed = store.get(_FAILURE).decode() if store.check([_FAILURE]) else None
            except RuntimeError as error:
                if not self._stop.is_set() and self._failure is None:
                    keeper = self._rank if self._store_rank is None else self._store_rank
                    self._failure = RankError(keeper, f"the store that joins the ranks does not answer: {error}")
                return
            now = time.monotonic()
            for rank, counter in zip(ranks, counters, strict=True):
                if rank not in self._seen or self._seen[rank][0] != counter:
                    self._seen[rank] = (counter, now)
            self._left = left
            if failed is not None:
                self._failure = self._failure or _read(failed)
            silent = self._silent(self._silence)
            if silent and self._failure is None:
                self.report(silent[0], f"its process has ended or stands still: no sign of life for {self._silence} s")


def _alive(rank: int) -> str:
    return f"alive/{rank}"


def _gone(rank: int) -> str:
    return f"left/{rank}"


def _read(notice: str) -> RankError:
    content = json.loads(notice)
    return RankError(content["rank"], content["error"])
