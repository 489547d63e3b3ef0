"""Under load: requests that come, go, wait, are cancelled and change places in the batch run as if they were alone."""

from __future__ import annotations

import gc
import os
import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from v41_config import TINY, ParallelLayout
from v41_goldens.reference_engine import ReferenceEngine
from v41_goldens.weights import ModelWeights
from v41_loader import Checkpoint
from v41_model.cache_budget import CacheBudget
from v41_model.generation import GroupStep, admit, advance
from v41_model.golden_twin import same_bits
from v41_model.request import Request
from v41_model.request_group import RequestGroup
from v41_model.sampling import Sampling
from v41_model.session import ModelSession

EIGHT_RANKS = ParallelLayout(4, 2)
NEW_TOKENS = 4


@dataclass
class Alone:
    """Each prompt by itself in one process, with the TP group's output partials: logits and tokens, step by step."""

    weights: ModelWeights
    parts: int

    def logits(self, request: Request) -> list[Tensor]:
        """FP32 `[V]` behind the prompt and behind each token of the request but the last."""
        engine = ReferenceEngine(TINY, self.weights, 1, request.longest, parts=self.parts)
        fed, found = list(request.prompt), []
        for token in request.generated:
            found.append(engine.step([(0, fed)]).logits[-1])
            fed = [token]
        return found


@dataclass
class Load:
    """Random arrivals, cancellations, chunk sizes and orders, from one seed."""

    session: ModelSession
    random: random.Random
    prompts: list[tuple[int, ...]]
    groups: list[RequestGroup] = field(init=False)
    logits: dict[Request, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        budget = CacheBudget({"window": 16, "c2a_cmp_kv": 8, "c1a_cmp_kv": 16, "c2a_state": 7}, 160)
        self.groups = admit(self.session, [], budget)

    def arrive(self) -> None:
        prompt = self.random.choice(self.prompts)
        number = self.prompts.index(prompt)
        sampling = Sampling(1.5, 0.9, seed=number) if number % 2 else Sampling()
        request = Request(prompt, self.random.randint(1, NEW_TOKENS), sampling=sampling)
        self.logits[request] = []
        self.random.choice(self.groups).submit(request)

    def step(self) -> list[GroupStep]:
        for group in self.groups:
            self.random.shuffle(group.running)  # batch rows change from step to step
            if group.has_work and self.random.random() < 0.15:
                group.cancel(self.random.choice([*group.running, *group.waiting]))
        steps = advance(self.session, self.groups, self.random.randint(3, 40))
        for step in steps:
            for (request, _), row in zip(step.planned, step.output.last_logits, strict=True):
                if any(new is request for new, _ in step.new_tokens):
                    self.logits[request].append(row.clone())
        return steps


def _prompts(count: int, seed: int) -> list[tuple[int, ...]]:
    """Short ones, and one that spans a page and its window."""
    random_ids = random.Random(seed)
    lengths = [*(random_ids.randint(1, 12) for _ in range(count - 1)), 140]
    return [tuple(random_ids.choices(range(3, TINY.vocab_size), k=length)) for length in lengths]


@pytest.mark.parametrize(
    ("requests", "prompts"), [(40, 8), pytest.param(200, 40, marks=pytest.mark.slow)], ids=["40", "200"]
)
def test_requests_in_a_crowd_run_as_if_alone(
    tiny_checkpoint: Checkpoint, tiny_weights: ModelWeights, requests: int, prompts: int
) -> None:
    """Through eight ranks: tokens and logits of every request, cancelled ones included, to the bit; then all pages,
    rows and stored lengths are back at their start."""
    session = ModelSession.open(tiny_checkpoint, EIGHT_RANKS)
    load = Load(session, random.Random(requests), _prompts(prompts, 5))
    start = [group.allocator.free_blocks for group in load.groups]
    waited = 0
    while len(load.logits) < requests or any(group.has_work for group in load.groups):
        for _ in range(min(load.random.randint(0, 12), requests - len(load.logits))):
            load.arrive()
        load.step()
        waited = max(waited, *(len(group.waiting) for group in load.groups))

    assert waited, "the pools are small enough for somebody to wait"
    assert any(request.cancelled for request in load.logits)
    longest: dict[tuple[int, ...], Request] = {}
    for request in load.logits:
        if len(request.generated) >= len(longest.get(request.prompt, request).generated):
            longest[request.prompt] = request
    alone = {prompt: Alone(tiny_weights, EIGHT_RANKS.tp).logits(request) for prompt, request in longest.items()}
    for request, found in load.logits.items():
        count = len(request.generated)
        assert request.generated == longest[request.prompt].generated[:count]
        assert len(found) == count
        assert all(map(same_bits, found, alone[request.prompt][:count]))
        assert request.cancelled or count == request.max_new_tokens
        assert request.row is None
    assert [group.allocator.free_blocks for group in load.groups] == start
    blocks = range(start[0]["c2a_state"])
    assert {session.stored_tokens(dp_rank, block) for dp_rank in range(EIGHT_RANKS.dp) for block in blocks} == {0}


def test_the_comparison_sees_one_bit(tiny_weights: ModelWeights) -> None:
    request = Request((3, 4), 2, generated=[5, 6])
    first, second = Alone(tiny_weights, 1).logits(request)
    assert not same_bits(first, second)
    changed = first.clone()
    changed.view(torch.int32)[7] ^= 1
    assert not same_bits(first, changed)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_a_soak_does_not_grow(tiny_checkpoint: Checkpoint) -> None:
    """2,000 steps of a crowd that never empties: neither Python objects nor the process's memory grow."""
    session = ModelSession.open(tiny_checkpoint, ParallelLayout(2, 1))
    load = Load(session, random.Random(1), _prompts(12, 6)[:-1])
    sizes = []
    for number in range(2000):
        while sum(len(group.running) + len(group.waiting) for group in load.groups) < 6:
            load.arrive()
        load.step()
        for request in [r for r in load.logits if r.finished]:
            del load.logits[request]
        if number in (499, 1999):
            gc.collect()
            sizes.append((len(gc.get_objects()), _resident_bytes()))
    (objects, resident), (objects_after, resident_after) = sizes
    assert objects_after < objects * 1.01
    assert resident_after < resident + (16 << 20)
