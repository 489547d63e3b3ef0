"""A token's result depends on its request's tokens alone: to the bit, whatever batch, chunks, pages and threads."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from v41_config import TINY
from v41_goldens import Capture, ModelWeights, ReferenceEngine
from v41_goldens.errors import OperandError
from v41_goldens.judges import assert_equal_bits, unequal_bits

LENGTH = 620  # five window pages, five of ratio 1, three of ratio 2; beyond every limit of TINY's indexer
POISON = 0xFF
COMPARED = ("attn_out", "moe_out", "X", "pre_mix", "router_ids", "topk")


@dataclasses.dataclass
class Trace:
    """What one request went through: logits of all its positions, layer tensors row by row, and its final caches."""

    logits: Tensor
    layers: dict[str, Tensor]
    state: dict[str, Tensor]


def prompt(request: int, length: int) -> list[int]:
    return random.Random(request).choices(range(TINY.vocab_size), k=length)


def run(engine: ReferenceEngine, schedule: Sequence[Sequence[tuple[int, Sequence[int]]]], watched: int) -> Trace:
    """Step through batches and collect the rows of one request."""
    logits: list[Tensor] = []
    layers: dict[str, list[Tensor]] = {}
    for batch in schedule:
        capture = Capture()
        output = engine.step(batch, capture)
        starts = [sum(len(part) for _, part in batch[:row]) for row in range(len(batch) + 1)]
        for row, (request, _) in enumerate(batch):
            if request != watched:
                continue
            rows = slice(starts[row], starts[row + 1])
            logits.append(output.logits[rows])
            for name, tensor in capture.tensors.items():
                if name.rsplit(".", 1)[-1] in COMPARED:
                    layers.setdefault(name, []).append(tensor[rows])
    joined = {name: torch.cat(parts) for name, parts in layers.items()}
    return Trace(torch.cat(logits), joined, engine.state_of(watched))


def assert_same(found: Trace, expected: Trace) -> None:
    assert found.layers.keys() == expected.layers.keys()
    for name, tensor in expected.layers.items():
        assert_equal_bits(found.layers[name], tensor, name)
    assert_equal_bits(found.logits, expected.logits, "logits")
    assert found.state.keys() == expected.state.keys()
    for name, tensor in expected.state.items():
        assert_equal_bits(found.state[name], tensor, name)


@pytest.fixture(scope="module")
def one_shot(tiny_weights: ModelWeights) -> Trace:
    """The whole prompt in one step, alone, in pages in order and zeroed memory."""
    engine = ReferenceEngine(TINY, tiny_weights, 1, LENGTH)
    trace = run(engine, [[(0, prompt(0, LENGTH))]], 0)
    assert trace.logits.isfinite().all()
    assert len(trace.layers) == len(COMPARED) * TINY.num_hidden_layers - (TINY.num_hidden_layers - 4)
    return trace


def mixed_schedule(seed: int) -> Iterator[list[tuple[int, list[int]]]]:
    """Request 2 is the one that is watched. Others come, pause and are longer or shorter; rows change order."""
    choose = random.Random(seed)
    left = {2: prompt(0, LENGTH), 0: prompt(7, 333), 4: prompt(8, 140), 3: prompt(9, 61)}
    while left[2]:
        sizes = {2: choose.choice([1, 2, 3, 31, 64, 129]), 0: choose.choice([0, 1, 50]),
                 4: choose.choice([0, 1, 1, 7]), 3: choose.choice([0, 20])}  # fmt: skip
        if len(left[2]) < 12:
            sizes[2] = 1  # decode
        batch = [(request, left[request][:size]) for request, size in sizes.items()]
        for request, size in sizes.items():
            left[request] = left[request][size:]
        choose.shuffle(batch)
        yield batch


@pytest.mark.parametrize("seed", [0, 1])
def test_chunks_batches_and_pages_do_not_matter(tiny_weights: ModelWeights, one_shot: Trace, seed: int) -> None:
    engine = ReferenceEngine(TINY, tiny_weights, 5, LENGTH, shuffle_seed=seed, fill_byte=POISON)
    schedule = list(mixed_schedule(seed))
    assert len({len(dict(batch)[2]) for batch in schedule}) > 3
    assert_same(run(engine, schedule, 2), one_shot)


def test_they_do_not_matter_to_fast_arithmetic_either(tiny_weights: ModelWeights) -> None:
    alone = run(ReferenceEngine(TINY, tiny_weights, 1, LENGTH, fast=True), [[(0, prompt(0, LENGTH))]], 0)
    engine = ReferenceEngine(TINY, tiny_weights, 5, LENGTH, shuffle_seed=2, fill_byte=POISON, fast=True)
    assert_same(run(engine, list(mixed_schedule(2)), 2), alone)


def test_threads_do_not_matter(tiny_weights: ModelWeights, one_shot: Trace) -> None:
    before = torch.get_num_threads()
    assert before == 1, "the other runs have one thread"
    length = 300  # enough for every operator to be split between threads
    torch.set_num_threads(2)
    try:
        found = run(ReferenceEngine(TINY, tiny_weights, 1, length), [[(0, prompt(0, LENGTH)[:length])]], 0)
    finally:
        torch.set_num_threads(before)
    for name, tensor in one_shot.layers.items():
        assert_equal_bits(found.layers[name], tensor[:length], name)
    assert_equal_bits(found.logits, one_shot.logits[:length], "logits")


def test_the_budget_of_index_scores_does_not_matter(tiny_weights: ModelWeights, one_shot: Trace) -> None:
    engine = ReferenceEngine(TINY, tiny_weights, 1, LENGTH, max_logits_bytes=100_000)
    assert_same(run(engine, [[(0, prompt(0, LENGTH))]], 0), one_shot)


def test_pages_are_reused_uncleared(tiny_weights: ModelWeights) -> None:
    """A released request's pages, state and ring go to the next one as they are; an odd length leaves an open pair."""
    tokens = prompt(3, 150)
    fresh = run(ReferenceEngine(TINY, tiny_weights, 1, 160), [[(0, tokens)]], 0)
    engine = ReferenceEngine(TINY, tiny_weights, 2, 160, shuffle_seed=4, fill_byte=POISON)
    engine.step([(1, prompt(4, 159))])
    engine.release(1)
    assert_same(run(engine, [[(1, tokens[:1])], [(1, tokens[1:70])], [(1, tokens[70:])]], 1), fresh)


def test_a_wrong_page_table_and_a_changed_token_are_seen(tiny_weights: ModelWeights) -> None:
    """The comparison has power: another request's pages, or one other token 130 positions ago, change the result."""
    tokens, stranger = prompt(0, 140), prompt(1, 140)
    other = tokens.copy()
    other[5] = (other[5] + 1) % TINY.vocab_size

    def last_logits(fed: list[int], swapped: str | None = None) -> Tensor:
        engine = ReferenceEngine(TINY, tiny_weights, 2, 140, shuffle_seed=3, fill_byte=POISON)
        engine.step([(0, fed[:-1]), (1, stranger[:-1])])
        if swapped is not None:
            engine._tables[swapped] = engine._tables[swapped][::-1].copy()
        return engine.step([(0, fed[-1:])]).logits

    expected = last_logits(tokens)
    assert_equal_bits(last_logits(tokens), expected, "the same again")
    assert unequal_bits(last_logits(other), expected).any()
    for table in ("window", "c2a_cmp_kv", "c1a_cmp_kv"):
        assert unequal_bits(last_logits(tokens, table), expected).any(), table


def test_free_memory_is_poisoned_indeed(tiny_weights: ModelWeights) -> None:
    """A page that was never written turns rows into NaN, which no expert can be chosen for: no read goes unnoticed."""
    engine = ReferenceEngine(TINY, tiny_weights, 2, 128, fill_byte=POISON)
    engine.step([(0, prompt(0, 100))])
    engine.lengths[1] = 100
    with pytest.raises(OperandError, match=r"gate scores\[0\]: .* found a NaN"):
        engine.step([(1, [5])])


@pytest.mark.parametrize("batch", [[], [(0, [])], [(2, []), (0, []), (1, [])]])
def test_batches_without_tokens(tiny_weights: ModelWeights, batch: list[tuple[int, list[int]]]) -> None:
    engine = ReferenceEngine(TINY, tiny_weights, 3, 64, fill_byte=POISON)
    for lengths in ([0, 0, 0], [17, 4, 0]):
        engine.lengths[:] = lengths
        output = engine.step(batch)
        assert output.logits.shape == (0, TINY.vocab_size)
        assert output.x_hc.shape == (0, TINY.hc_mult, TINY.hidden_size)
        assert engine.lengths.tolist() == lengths
    assert all(state.isnan().all() for state in engine.caches.state.values())
    assert all(cache.scale.float().isnan().all() for cache in engine.caches.window.values())


def test_repeated_runs_are_equal(tiny_weights: ModelWeights) -> None:
    first = ReferenceEngine(TINY, tiny_weights, 1, 64).step([(0, prompt(5, 40))])
    for _ in range(5):
        again = ReferenceEngine(TINY, tiny_weights, 1, 64).step([(0, prompt(5, 40))])
        assert_equal_bits(again.logits, first.logits, "logits")
        assert_equal_bits(again.x_hc, first.x_hc, "streams")
