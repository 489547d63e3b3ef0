"""Prompts in, tokens out: continuous batching on top of a :class:`ModelSession`.

A step runs every request that decodes and as many prompt rows as fit; requests that wait for cache memory are
admitted as others end. A request's tokens do not depend on its company (model.md section 17).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from v41_model.cache_budget import CacheBudget
from v41_model.errors import RequestError
from v41_model.integer_checks import checked_integer
from v41_model.request import Request, check_prompt, checked_request
from v41_model.request_group import RequestGroup
from v41_model.sampling import GREEDY, Sampling, choose_tokens
from v41_model.session import GroupOutput, ModelSession

__all__ = [
    "GroupStep",
    "NewToken",
    "Request",
    "RequestGroup",
    "admit",
    "advance",
    "check_prompt",
    "generate",
    "stream",
]


@dataclass(frozen=True)
class GroupStep:
    """One step of one DP group: what ran, what the session gave, and the tokens that are new."""

    planned: list[tuple[Request, int]]
    output: GroupOutput
    new_tokens: list[tuple[Request, int]]


def advance(
    session: ModelSession,
    groups: Sequence[RequestGroup],
    max_rows: int | None = None,
    *,
    all_logits: bool = False,
    capture: bool = False,
) -> list[GroupStep]:
    """One step of every DP group, of ``max_rows`` rows each (default: the session's limit of prefill rows).

    Lengths and tokens are committed only when it has succeeded.
    """
    max_rows = session.limits.prefill_rows if max_rows is None else max_rows
    plans = [group.plan(max_rows) for group in groups]
    batches = [group.batch(plan) for group, plan in zip(groups, plans, strict=True)]
    outputs = session.step(batches, all_logits=all_logits, capture=capture)
    chosen = [
        choose_tokens(
            output.last_logits, [(request.sampling, len(request.generated)) for request, _ in plan], session.operators
        )
        for output, plan in zip(outputs, plans, strict=True)
    ]
    return [
        GroupStep(plan, output, group.commit(plan, tokens))
        for group, plan, output, tokens in zip(groups, plans, outputs, chosen, strict=True)
    ]


def admit(
    session: ModelSession,
    requests: Sequence[Request],
    budget: CacheBudget | None = None,
    max_rows: int | None = None,
) -> list[RequestGroup]:
    """Allocate caches and spread requests over the DP groups contiguously.

    ``budget`` is by default what the requests need that can run at the same time, with steps as :func:`advance` takes
    them.

    Errors: :class:`RequestError` for a request that cannot be run, :class:`PoolError` for one that ``budget`` could
    not hold if it were alone.
    """
    for index, request in enumerate(requests):
        check_prompt(session.config, f"requests[{index}]", request.prompt, request.max_new_tokens)
    layout, limits = session.layout, session.limits
    ranges = [layout.request_range(len(requests), dp_rank) for dp_rank in range(layout.dp)]
    parts = [requests[part.start : part.stop] for part in ranges]
    if budget is None:
        lengths = [[request.longest for request in part] for part in parts]
        rows = limits.prefill_rows if max_rows is None else max_rows
        budget = CacheBudget.for_groups(session.config, lengths, limits.sequences, rows)
    session.allocate(budget)
    return [RequestGroup(session, dp_rank, part) for dp_rank, part in enumerate(parts)]


@dataclass(frozen=True)
class NewToken:
    """A token as it comes: of which prompt, and whether the request ends with it."""

    request: int
    token: int
    last: bool


def stream(
    session: ModelSession,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    *,
    sampling: Sampling | Sequence[Sampling] = GREEDY,
    budget: CacheBudget | None = None,
    max_step_rows: int | None = None,
) -> Iterator[NewToken]:
    """Continue every prompt, yielding tokens as they come: at most ``max_new_tokens`` each, less when one of
    ``stop_ids`` comes, which is yielded too.

    ``sampling`` is one for each prompt, or one whose seed is the first prompt's: the next ones count up from it. A DP
    group runs at most ``max_step_rows`` rows in a step (default: the session's limit). Allocates the session's caches,
    with ``budget`` as :func:`admit` takes it.

    Errors: :class:`RequestError` for a prompt that cannot be run or a number out of range, :class:`PoolError` for a
    prompt that the budget cannot hold; both before anything runs.
    """
    requests = _requests(session, prompts, max_new_tokens, stop_ids, sampling)
    rows = None if max_step_rows is None else checked_integer("max_step_rows", max_step_rows, 1)
    index_of = {request: index for index, request in enumerate(requests)}
    groups = admit(session, requests, budget, rows)
    return _tokens(session, groups, index_of, rows)


def _tokens(
    session: ModelSession, groups: Sequence[RequestGroup], index_of: dict[Request, int], rows: int | None
) -> Iterator[NewToken]:
    while any(group.has_work for group in groups):
        for step in advance(session, groups, rows):
            for request, token in step.new_tokens:
                yield NewToken(index_of[request], token, request.finished)


def generate(
    session: ModelSession,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    on_token: Callable[[int, int], None] | None = None,
    max_step_rows: int | None = None,
    *,
    sampling: Sampling | Sequence[Sampling] = GREEDY,
    budget: CacheBudget | None = None,
) -> list[list[int]]:
    """:func:`stream` to its end: the new tokens per prompt. ``on_token(prompt, token)`` sees them as they come."""
    tokens = stream(
        session, prompts, max_new_tokens, stop_ids, sampling=sampling, budget=budget, max_step_rows=max_step_rows
    )
    generated: list[list[int]] = [[] for _ in prompts]
    for new in tokens:
        generated[new.request].append(new.token)
        if on_token is not None:
            on_token(new.request, new.token)
    return generated


def _requests(
    session: ModelSession,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_ids: Collection[int],
    sampling: Sampling | Sequence[Sampling],
) -> list[Request]:
    if isinstance(sampling, Sampling):
        sampling = [replace(sampling, seed=(sampling.seed + index) % (1 << 64)) for index in range(len(prompts))]
    if len(sampling) != len(prompts):
        raise RequestError("sampling", f"{len(sampling)} of them", f"one for each of {len(prompts)} prompts")
    for index, how in enumerate(sampling):
        if not isinstance(how, Sampling):
            raise RequestError(f"sampling[{index}]", how, "a Sampling")
    return [
        checked_request(session.config, f"requests[{index}]", prompt, max_new_tokens, stop_ids, how)
        for index, (prompt, how) in enumerate(zip(prompts, sampling, strict=True))
    ]
