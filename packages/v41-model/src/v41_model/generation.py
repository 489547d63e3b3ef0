"""Prompts in, tokens out: admission, pages and the order of work on top of a :class:`ModelSession`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from v41_config import ModelConfig
from v41_goldens.greedy import greedy_tokens
from v41_model.errors import RequestError
from v41_model.integer_checks import checked_integer, checked_token_ids
from v41_model.page_allocator import PageAllocator, blocks_for_requests
from v41_model.session import GroupOutput, ModelSession
from v41_model.step_batch import StepBatch

__all__ = [
    "MAX_STEP_ROWS",
    "GroupStep",
    "Request",
    "RequestGroup",
    "admit",
    "advance",
    "check_prompt",
    "generate",
]

MAX_STEP_ROWS = 4096
"""Rows of a DP group in one step; longer prompts are prefilled in chunks."""


def check_prompt(config: ModelConfig, where: str, tokens: Sequence[int], new_tokens: int) -> tuple[int, ...]:
    """A prompt's ids as plain integers.

    Errors: :class:`RequestError` for a prompt that is empty, holds anything but ids of the vocabulary, or grows past
    the last position.
    """
    ids = checked_token_ids(where, tokens, config.vocab_size)
    if not ids:
        raise RequestError(where, "no tokens", "at least one token id")
    if len(ids) + new_tokens > config.max_position_embeddings:
        expected = f"at most max_position_embeddings = {config.max_position_embeddings} with what is generated"
        raise RequestError(where, f"{len(ids)} tokens + {new_tokens} new ones", expected)
    return ids


@dataclass
class Request:
    """One sequence: its prompt, what was generated, and how much of both is stored in the caches."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    generated: list[int] = field(default_factory=list)
    stored: int = 0
    row: int | None = None

    @property
    def pending(self) -> int:
        """Tokens known but not stored yet: the rest of the prompt, or the last one generated."""
        return len(self.prompt) + len(self.generated) - self.stored

    def next_tokens(self, count: int) -> list[int]:
        """The first ``count`` pending tokens."""
        return self._tokens(self.stored, self.stored + count)

    def tokens_before(self, count: int) -> list[int]:
        """The last ``count`` stored tokens: after a step, those it has run."""
        return self._tokens(self.stored - count, self.stored)

    def _tokens(self, start: int, stop: int) -> list[int]:
        prompt = len(self.prompt)
        return [*self.prompt[start:stop], *self.generated[max(0, start - prompt) : max(0, stop - prompt)]]

    @property
    def finished(self) -> bool:
        stopped = bool(self.generated) and self.generated[-1] in self.stop_ids
        return stopped or len(self.generated) >= self.max_new_tokens


class RequestGroup:
    """The requests of one DP group, with its pages. All are admitted at once; the pool must hold them."""

    def __init__(self, config: ModelConfig, allocator: PageAllocator, requests: Sequence[Request]) -> None:
        self.config = config
        self.allocator = allocator
        self.running = list(requests)
        for request in self.running:
            request.row = allocator.admit()

    def plan(self, max_rows: int = MAX_STEP_ROWS) -> list[tuple[Request, int]]:
        """The next step's requests and how many rows each runs, in order, up to ``max_rows`` rows together."""
        planned = []
        for request in self.running:
            rows = min(request.pending, max_rows)
            if rows:
                planned.append((request, rows))
                max_rows -= rows
        return planned

    def batch(self, planned: Sequence[tuple[Request, int]]) -> StepBatch:
        """Lend the pages of a plan and pack its rows. Errors: :class:`PoolError` when a pool is full."""
        if not planned:
            return StepBatch.idle(self.config)
        rows = []
        for request, count in planned:
            assert request.row is not None
            self.allocator.grow(request.row, request.stored + count)
            rows.append(request.row)
        ids = [token for request, count in planned for token in request.next_tokens(count)]
        return StepBatch(
            token_ids=np.array(ids, dtype=np.int32),
            query_start_loc=np.cumsum([0, *(count for _, count in planned)]),
            kv_seq_lens=np.array([request.stored for request, _ in planned]),
            window_block_table=self.allocator.window_block_table(rows),
            compressed_block_tables=self.allocator.compressed_block_tables(rows),
            state_block_tables=self.allocator.state_block_tables(rows),
        )

    def commit(self, planned: Sequence[tuple[Request, int]], next_tokens: Sequence[int]) -> list[tuple[Request, int]]:
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
            assert request.row is not None
            self.allocator.drop(request.row)
            request.row = None
            self.running.remove(request)
        return new


@dataclass(frozen=True)
class GroupStep:
    """One step of one DP group: what ran, what the session gave, and the tokens that are new."""

    planned: list[tuple[Request, int]]
    output: GroupOutput
    new_tokens: list[tuple[Request, int]]


def advance(
    session: ModelSession,
    groups: Sequence[RequestGroup],
    max_rows: int = MAX_STEP_ROWS,
    *,
    all_logits: bool = False,
    capture: bool = False,
) -> list[GroupStep]:
    """One greedy step of every DP group. Lengths and tokens are committed only when it has succeeded."""
    plans = [group.plan(max_rows) for group in groups]
    batches = [group.batch(plan) for group, plan in zip(groups, plans, strict=True)]
    outputs = session.step(batches, all_logits=all_logits, capture=capture)
    chosen = [greedy_tokens(output.last_logits).tolist() for output in outputs]
    return [
        GroupStep(plan, output, group.commit(plan, tokens))
        for group, plan, output, tokens in zip(groups, plans, outputs, chosen, strict=True)
    ]


def admit(session: ModelSession, requests: Sequence[Request]) -> list[RequestGroup]:
    """Spread requests over the DP groups contiguously and allocate the caches they need at their longest.

    Errors: :class:`RequestError` for a request that cannot be run.
    """
    config = session.config
    for index, request in enumerate(requests):
        check_prompt(config, f"requests[{index}]", request.prompt, request.max_new_tokens)
    layout = session.layout
    ranges = [layout.request_range(len(requests), dp_rank) for dp_rank in range(layout.dp)]
    parts = [requests[part.start : part.stop] for part in ranges]
    lengths = [[len(r.prompt) + r.max_new_tokens for r in part] for part in parts]
    needs = [blocks_for_requests(config, part) for part in lengths]
    # at least one block: a pool without rows could not be read even for "no row"
    blocks = {table: max(1, *(need[table] for need in needs)) for table in needs[0]}
    longest = max((n for part in lengths for n in part), default=1)
    session.allocate(blocks, longest)
    most = max(len(part) for part in parts)
    return [RequestGroup(config, PageAllocator(config, blocks, most, longest), part) for part in parts]


def generate(
    session: ModelSession,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    on_token: Callable[[int, int], None] | None = None,
    max_step_rows: int = MAX_STEP_ROWS,
) -> list[list[int]]:
    """Greedy continuation of every prompt: at most ``max_new_tokens`` each, less when one of ``stop_ids`` comes.

    ``on_token(prompt index, token)`` is called as tokens come; a DP group runs at most ``max_step_rows`` rows in a
    step. Allocates the session's caches. Returns the new tokens per prompt.

    Errors: :class:`RequestError` for a prompt that cannot be run, or a number out of range.
    """
    max_new_tokens = checked_integer("max_new_tokens", max_new_tokens, 1)
    max_step_rows = checked_integer("max_step_rows", max_step_rows, 1)
    vocabulary = session.config.vocab_size
    stops = frozenset(checked_token_ids("stop_ids", stop_ids, vocabulary))
    requests = [
        Request(checked_token_ids(f"requests[{index}]", prompt, vocabulary), max_new_tokens, stops)
        for index, prompt in enumerate(prompts)
    ]
    index_of = {id(request): index for index, request in enumerate(requests)}
    groups = admit(session, requests)
    while any(group.running for group in groups):
        for step in advance(session, groups, max_step_rows):
            for request, token in step.new_tokens:
                if on_token is not None:
                    on_token(index_of[id(request)], token)
    return [request.generated for request in requests]
