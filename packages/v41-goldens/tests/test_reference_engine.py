"""The reference engine's own contract: requests, pages, refusals and greedy continuation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from v41_config import TINY
from v41_goldens import ModelWeights, ReferenceEngine
from v41_goldens.errors import OperandError
from v41_goldens.judges import assert_equal_bits


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([(2, [1])], r"batch\[0\]: expected a request from 0 to 1, once, found 2"),
        ([(0, [1]), (-1, [1])], r"batch\[1\]: expected a request from 0 to 1, once, found -1"),
        ([(0, [1]), (0, [1])], r"batch\[1\]: .* found 0"),
        ([(0, []), (0, [1])], r"batch\[1\]: .* found 0"),
        ([(0, [1] * 10), (1, [1] * 41)], r"batch\[1\]: expected at most 40 tokens in a request, found 41"),
    ],
)
def test_a_batch_that_is_refused_changes_nothing(
    tiny_weights: ModelWeights, batch: list[tuple[int, list[int]]], message: str
) -> None:
    engine = ReferenceEngine(TINY, tiny_weights, 2, 40, fill_byte=0xFF)
    with pytest.raises(OperandError, match=message):
        engine.step(batch)
    assert engine.lengths.tolist() == [0, 0]
    assert all(cache.scale.float().isnan().all() for cache in engine.caches.window.values())
    assert engine.step([(0, [1] * 40)]).logits.isfinite().all()
    with pytest.raises(OperandError, match="found 41"):
        engine.step([(0, [1])])
    with pytest.raises(OperandError, match="found 7"):
        engine.release(7)


@pytest.mark.parametrize("token", [1.5, True, "1", 2.0, None, torch.tensor(1.5)])
def test_a_token_that_is_no_integer_is_refused(tiny_weights: ModelWeights, token: object) -> None:
    engine = ReferenceEngine(TINY, tiny_weights, 2, 40)
    with pytest.raises(OperandError, match=r"batch\[1\] token 2: expected an integer token id"):
        engine.step([(0, [1]), (1, [1, 2, token])])  # type: ignore[list-item]
    assert engine.lengths.tolist() == [0, 0]
    assert engine.step([(0, np.arange(3))]).logits.shape == (3, TINY.vocab_size)  # type: ignore[list-item]


def test_nothing_follows_an_empty_prompt(tiny_weights: ModelWeights) -> None:
    engine = ReferenceEngine(TINY, tiny_weights, 1, 40)
    for count in (0, 2):
        with pytest.raises(OperandError, match="prompt: expected at least one token id"):
            engine.generate(0, [], count)
    assert engine.lengths.tolist() == [0]


@pytest.mark.parametrize("count", [-1, 10**9])
def test_a_count_that_no_request_can_hold(tiny_weights: ModelWeights, count: int) -> None:
    engine = ReferenceEngine(TINY, tiny_weights, 1, 40)
    with pytest.raises(OperandError, match=f"count: expected 0 to max_tokens = 40, found {count}"):
        engine.generate(0, [1], count)
    assert engine.lengths.tolist() == [0]


def test_an_engine_without_weights_only_makes_contexts() -> None:
    engine = ReferenceEngine(TINY, None, 1, 8)
    with pytest.raises(OperandError, match="weights to step with"):
        engine.step([(0, [1])])
    assert engine.context([0], [3]).metadata.position_ids.tolist() == [0, 1, 2]
    assert engine.context([0], [2]).metadata.position_ids.tolist() == [3, 4]


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_every_block_belongs_to_one_request(seed: int | None) -> None:
    engine = ReferenceEngine(TINY, None, 3, 300, shuffle_seed=seed)
    assert {name: table.shape for name, table in engine._tables.items()} == {
        "window": (3, 3), "c2a_cmp_kv": (3, 2), "c2a_state": (3, 1), "c1a_cmp_kv": (3, 3)
    }  # fmt: skip
    for table in engine._tables.values():
        assert sorted(table.flatten().tolist()) == list(range(table.size))
        assert (seed is None) == np.array_equal(table.flatten(), np.arange(table.size)) or table.size == 3


def test_greedy_continuation_is_the_argmax_of_the_extended_prompt(tiny_weights: ModelWeights) -> None:
    prompt = [5, 17, 300]
    produced = ReferenceEngine(TINY, tiny_weights, 1, 16).generate(0, prompt, 6)
    assert len(produced) == 6
    whole = ReferenceEngine(TINY, tiny_weights, 1, 16).step([(0, prompt + produced)]).logits
    assert produced == whole[2:8].argmax(dim=1).tolist()
    assert ReferenceEngine(TINY, tiny_weights, 1, 16).generate(0, prompt, 0) == []


def test_equal_logits_give_the_lowest_id(tiny_weights: ModelWeights) -> None:
    """argmax takes the first of equal maxima; the head's rows are all the same here."""
    same = ModelWeights(
        tiny_weights.embed, tiny_weights.layers, tiny_weights.norm, tiny_weights.head[:1].expand(512, -1)
    )
    assert ReferenceEngine(TINY, same, 1, 16).generate(0, [5, 6], 2) == [0, 0]


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_change_bits_at_most_by_rounding(tiny_weights: ModelWeights, parts: int) -> None:
    tokens = list(range(100, 130))
    whole = ReferenceEngine(TINY, tiny_weights, 1, 32).step([(0, tokens)])
    split = ReferenceEngine(TINY, tiny_weights, 1, 32, parts=parts).step([(0, tokens)])
    # TINY's partials are sums of few short products, which FP32 adds exactly in nearly every case.
    assert torch.equal(split.logits.argmax(1), whole.logits.argmax(1))
    with pytest.raises(OperandError, match="divisor of the 4 output groups"):
        ReferenceEngine(TINY, tiny_weights, 1, 32, parts=3).step([(0, tokens)])


@pytest.mark.parametrize("length", [1, 16, 17, 40, 41])
def test_state_of_a_request_in_logical_order(tiny_weights: ModelWeights, length: int) -> None:
    tokens = [(7 * i) % 512 for i in range(41)]
    plain = ReferenceEngine(TINY, tiny_weights, 1, 41)
    plain.step([(0, tokens[:length])])
    shuffled = ReferenceEngine(TINY, tiny_weights, 3, 41, shuffle_seed=8, fill_byte=0xFF)
    for start in range(0, length, 7):
        shuffled.step([(1, tokens[start : min(start + 7, length)])])
    expected, found = plain.state_of(0), shuffled.state_of(1)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_equal_bits(found[name], tensor, name)
    assert expected["layer.00.window_ring"].shape == (16, 64)
    assert expected["layer.02.compressed_kv"].shape == (length // 2, 64)
    assert expected["layer.06.index_k"].shape == (length, 64)
    assert ("layer.02.compressor_kv_state" in expected) == bool(length % 2)
    assert expected["layer.00.window_ring"].any(dim=1).sum() == min(length, 16)
