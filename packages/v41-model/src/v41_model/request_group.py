"""The requests of one DP group: who waits, who runs, and what each step takes of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from v41_model.cache_budget import CacheBudget, blocks_for_request
from v41_model.errors import PoolError, SessionError
from v41_model.page_allocator import PageAllocator
from v41_model.request import Request
from v41_model.session import ModelSession
from v41_model.step_batch import StepBatch

__all__ = ["RequestGroup"]

Planned = list[tuple[Request, int]]


class RequestGroup:
    """Continuous batching for one DP group of a session that has caches.

    A request is admitted when the blocks it can ever need are free or will not be claimed by others, in order of
    arrival; from then on it always gets the pages of its next row, so nobody is ever thrown out again. Every request
    that decodes runs in every step; what rows are left go to prompts, in order of admission.
    """

    def __init__(self, session: ModelSession, dp_rank: int, requests: Iterable[Request] = ()) -> None:
        budget = session.budget
        if budget is None:
            raise SessionError("RequestGroup", "a session without caches", "a call of allocate first")
        self.config = session.config
        self.session, self.dp_rank = session, dp_rank
        self.allocator = PageAllocator(self.config, budget.blocks, session.limits.sequences, budget.max_tokens)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        for request in requests:
            self.submit(request)

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.waiting or self.running)

    def submit(self, request: Request) -> None:
        """Queue a request; it runs from the next step on if there is room for it.

        Errors: :class:`PoolError` for one that would not fit if it were alone, with the pool that is too small.
        """
        budget = self.session.budget
        assert budget is not None
        _check_fits_alone(request, budget, blocks_for_request(self.config, request.longest))
        self.waiting.append(request)
        self._admit()

    def cancel(self, request: Request) -> None:
        """Nobody waits for a request any more: its pages are free before the next step. Nothing if it has ended."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self._release(request)
        else:
            return
        request.cancelled = True

    def plan(self, max_rows: int) -> Planned:
        """Admit who fits, then choose the requests of the next step and how many rows each runs, ``max_rows`` together.

        Pages are lent here, so that a later request sees what an earlier one took.
        """
        self._admit()
        rows: dict[int, int] = {}
        decoding = [request for request in self.running if request.decodes]
        reading = [request for request in self.running if not request.decodes]
        for request in (*decoding, *reading):
            assert request.row is not None
            count = min(request.pending, max_rows - sum(rows.values()))
            count = min(count, self.allocator.room(request.row) - request.stored)
            if count > 0:
                self.allocator.grow(request.row, request.stored + count)
                rows[id(request)] = count
        return [(request, rows[id(request)]) for request in self.running if id(request) in rows]

    def batch(self, planned: Planned) -> StepBatch:
        """Pack the rows of a plan."""
        if not planned:
            return StepBatch.idle(self.config)
        rows = [request.row for request, _ in planned if request.row is not None]
        ids = [token for request, count in planned for token in request.next_tokens(count)]
        return StepBatch(
            token_ids=np.array(ids, dtype=np.int32),
            query_start_loc=np.cumsum([0, *(count for _, count in planned)]),
            kv_seq_lens=np.array([request.stored for request, _ in planned]),
            window_block_table=self.allocator.window_block_table(rows),
            compressed_block_tables=self.allocator.compressed_block_tables(rows),
            state_block_tables=self.allocator.state_block_tables(rows),
        )

    def commit(self, planned: Planned, next_tokens: Sequence[int]) -> list[tuple[Request, int]]:
        """After a step that succeeded: store lengths, append tokens, free pages; the tokens that are new.

        ``next_tokens`` has one entry per planned request; it counts only where the whole prompt is stored.
        """
        new = []
        for (request, count), token in zip(planned, next_tokens, strict=True):
            assert request.row is not None
            request.stored += count
            self.allocator.free_behind_window(request.row, request.stored)
            if request.pending == 0:
                request.generated.append(token)
                new.append((request, token))
        for request in [r for r in self.running if r.finished]:
            self._release(request)
        return new

    def _admit(self) -> None:
        while self.waiting:
            need = blocks_for_request(self.config, self.waiting[0].longest)
            if not self.allocator.can_admit(need):
                return
            request = self.waiting.popleft()
            request.row = self.allocator.admit(need)
            self.running.append(request)

    def _release(self, request: Request) -> None:
        assert request.row is not None
        for blocks in self.allocator.state_block_tables([request.row]).values():
            self.session.reset_request(self.dp_rank, int(blocks[0, 0]))
        self.allocator.drop(request.row)
        request.row = None
        self.running.remove(request)


def _check_fits_alone(request: Request, budget: CacheBudget, need: dict[str, int]) -> None:
    if request.longest > budget.max_tokens:
        found = f"{len(request.prompt)} tokens and {request.max_new_tokens} new ones"
        raise PoolError("request", found, f"at most max_tokens = {budget.max_tokens} of the cache budget")
    for table, count in need.items():
        if count > budget.blocks[table]:
            found = f"a request of up to {request.longest} tokens that needs {count}"
            raise PoolError(f"pool {table}", found, f"a need of at most the pool's {budget.blocks[table]} blocks")
