"""Deterministic top-k: score descending, index ascending, whatever the order in which scores arrive."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from v41_goldens.top_k import select_positions, top_k_indices, top_k_mask

# A few values only, so that ties are the rule; both zeros, both infinities, and neighbours in BF16.
TIED = st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 0.5, 0.501953125, 3.0, 3.3e38, math.inf])


def slow_order(scores: list[float]) -> list[int]:
    """Python's own stable sort: its floats compare -0.0 and 0.0 equal."""
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))


@settings(deadline=None, max_examples=300)
@given(st.lists(TIED, max_size=40), st.integers(0, 50))
def test_equals_a_slow_sort(scores: list[float], k: int) -> None:
    row = torch.tensor(scores, dtype=torch.bfloat16)
    values = row.double().tolist()
    best = slow_order(values)[:k]
    assert top_k_indices(row, k).tolist() == best
    assert top_k_mask(row, k).nonzero().flatten().tolist() == sorted(best)
    live = sorted(index for index in best if values[index] > -math.inf)
    assert select_positions(row, k).tolist() == live + [-1] * (k - len(live))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_tile_order_does_not_matter(data: st.DataObject) -> None:
    """The best of each tile, then the best of those, in any order of tiles and within them: the same set."""
    scores = data.draw(st.lists(TIED, min_size=1, max_size=48))
    k = data.draw(st.integers(1, 12))
    arrival = data.draw(st.permutations(range(len(scores))))
    tile = data.draw(st.integers(1, 9))
    row = torch.tensor(scores, dtype=torch.bfloat16)
    survivors: list[int] = []
    for start in range(0, len(scores), tile):
        candidates = sorted(survivors + arrival[start : start + tile])
        kept = top_k_indices(row[candidates], k).tolist()
        survivors = [candidates[index] for index in kept]
    assert sorted(survivors) == sorted(top_k_indices(row, k).tolist())


@pytest.mark.parametrize("score", [0.0, -0.0, 1.0, -1.0])
def test_lowest_indices_win_among_equals(score: float) -> None:
    scores = torch.full((3, 40_000), score, dtype=torch.bfloat16)
    assert torch.equal(select_positions(scores, 512), torch.arange(512, dtype=torch.int32).expand(3, 512))


def test_the_two_zeros_are_equal() -> None:
    scores = torch.tensor([-1.0, -0.0, 0.0, -0.0, 0.0], dtype=torch.bfloat16)
    assert top_k_indices(scores, 3).tolist() == [1, 2, 3]


@pytest.mark.parametrize("length", [0, 1, 511, 512, 513, 40_000])
def test_width_is_fixed_and_the_tail_is_minus_one(length: int) -> None:
    scores = torch.randn(2, length, generator=torch.Generator().manual_seed(length)).bfloat16()
    selected = select_positions(scores, 512)
    assert selected.shape == (2, 512)
    assert selected.dtype == torch.int32
    count = min(length, 512)
    for row, own in zip(selected.tolist(), scores.double().tolist(), strict=True):
        assert row[:count] == sorted(slow_order(own)[:512])
        assert row[count:] == [-1] * (512 - count)


def test_minus_infinity_is_never_selected() -> None:
    scores = torch.full((4,), -math.inf, dtype=torch.bfloat16)
    assert select_positions(scores, 3).tolist() == [-1, -1, -1]
    scores[2] = -3e38
    assert select_positions(scores, 3).tolist() == [2, -1, -1]


def test_padding_changes_nothing() -> None:
    scores = torch.tensor([0.0, -5.0, 0.0, 2.0], dtype=torch.bfloat16)
    padded = torch.nn.functional.pad(scores, (0, 100), value=-math.inf)
    assert torch.equal(select_positions(scores, 3), select_positions(padded, 3))


def test_rows_are_independent_and_fp32_keeps_all_its_bits() -> None:
    scores = torch.stack([torch.tensor([1.0, 1.0 + 2**-23, 1.0]), torch.tensor([1.0, 1.0, 1.0 - 2**-24])])
    assert top_k_indices(scores, 2).tolist() == [[1, 0], [0, 1]]


def wrong_last_index_first(scores: Tensor, k: int) -> Tensor:
    return scores.shape[-1] - 1 - top_k_indices(scores.flip(-1), k)


def wrong_signed_zero(scores: Tensor, k: int) -> Tensor:
    """Sorting bit patterns without joining the two zeros."""
    bits = scores.float().view(torch.int32)
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits).sort(descending=True, stable=True).indices[..., :k]


def test_wrong_orders_are_seen() -> None:
    scores = torch.tensor([0.0, -0.0, 0.0, 1.0], dtype=torch.bfloat16)
    assert top_k_indices(scores, 2).tolist() == [3, 0]
    assert wrong_last_index_first(scores, 2).tolist() != [3, 0]
    assert wrong_signed_zero(scores, 3).tolist() != top_k_indices(scores, 3).tolist() == [3, 0, 1]
