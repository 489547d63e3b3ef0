"""Candidate blocks: which blocks of entries a restricted layer may select from."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from v41_config import TINY, ModelConfig
from v41_goldens.candidate_blocks import candidate_blocks, entries_of_blocks

SIZE, TOP = TINY.candidate_block_size, TINY.candidate_topk_blocks


def with_top(top: int) -> ModelConfig:
    fields = {name: getattr(TINY, name) for name in ModelConfig.model_fields}
    return ModelConfig.model_validate({**fields, "candidate_topk_blocks": top, "index_topk": 1})


def kept_of(scores: list[float], visible: int, config: ModelConfig = TINY) -> list[int]:
    """Kept blocks of one query; what lies beyond `visible` is masked as the indexer masks it."""
    row = torch.tensor(scores, dtype=torch.bfloat16)
    row[visible:] = -math.inf
    return candidate_blocks(row, torch.tensor(visible), config).kept.nonzero().flatten().tolist()


def slow_kept(scores: list[float], visible: int, top: int) -> list[int]:
    blocks = {}
    for start in range(0, visible, SIZE):
        blocks[start // SIZE] = max(scores[start : min(start + SIZE, visible)])
    if visible:
        blocks[(visible - 1) // SIZE] = math.inf
    live = [block for block, score in blocks.items() if score > -math.inf]
    return sorted(sorted(live, key=lambda block: (-blocks[block], block))[:top])


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_equals_a_slow_choice(data: st.DataObject) -> None:
    scores = data.draw(st.lists(st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 2.0]), max_size=80))
    visible = data.draw(st.integers(0, len(scores)))
    top = data.draw(st.integers(1, 6))
    assert kept_of(scores, visible, with_top(top)) == slow_kept(scores, visible, top)


def test_the_newest_visible_block_is_pinned() -> None:
    """Block 5 is the worst of all and its only visible entry is the newest one."""
    scores = [9.0] * 40 + [-9.0] * 8
    assert kept_of(scores, 41) == [0, 1, 2, 5]
    assert kept_of(scores, 40) == [0, 1, 2, 4]


def test_no_first_block_is_pinned() -> None:
    assert kept_of([-9.0] * 8 + [1.0] * 56, 64) == [1, 2, 3, 7]


def test_ties_keep_the_lower_block() -> None:
    assert kept_of([0.0] * 80, 80) == [0, 1, 2, 9]
    assert kept_of([0.0] * 40 + [-0.0] * 40, 80) == [0, 1, 2, 9]


def test_nothing_visible_keeps_nothing() -> None:
    assert kept_of([1.0] * 20, 0) == []
    assert candidate_blocks(torch.empty(3, 0).bfloat16(), torch.zeros(3).int(), TINY).kept.shape == (3, 0)


@pytest.mark.parametrize("visible", [1, 8, 9, 31, 32])
def test_up_to_the_limit_every_visible_block_is_kept(visible: int) -> None:
    assert kept_of([-5.0] * visible, visible) == list(range(-(-visible // SIZE)))


def test_blocks_without_a_finite_score_are_dropped() -> None:
    """Fewer live blocks than there is room for: a block of -inf does not fill it, unless it is the pinned one."""
    assert kept_of([1.0] * 8 + [-math.inf] * 24, 32) == [0, 3]


def test_the_block_score_is_its_best_entry() -> None:
    """One high entry in a low block wins over a block that is better on average."""
    scores = [2.0] * 48 + [-1.0] * 7 + [7.0] + [0.0] * 8
    result = candidate_blocks(torch.tensor(scores).bfloat16(), torch.tensor(64), TINY)
    assert result.score.tolist() == [2.0] * 6 + [7.0, math.inf]
    assert result.kept.nonzero().flatten().tolist() == [0, 1, 6, 7]


def test_many_blocks_up_to_the_last_id() -> None:
    """2,048 of 5,000 blocks, as at the released sizes; the last block id is the pinned one and is not cut off."""
    config = with_top(2048)
    scores = torch.randn(2, 5000 * SIZE - 3, generator=torch.Generator().manual_seed(3)).bfloat16()
    kept = candidate_blocks(scores, torch.tensor([5000 * SIZE - 3, 8000]), config).kept
    scores[1, 8000:] = -math.inf
    assert kept[0].nonzero().flatten().tolist() == slow_kept(scores[0].tolist(), 5000 * SIZE - 3, 2048)
    assert kept[0, -1]
    assert kept[0].sum() == 2048


def test_entries_of_blocks_follow_their_block() -> None:
    kept = torch.tensor([[True, False, True], [False, True, False]])
    mask = entries_of_blocks(kept, 19, TINY)
    assert mask.shape == (2, 19)
    assert mask[0].nonzero().flatten().tolist() == [*range(8), 16, 17, 18]
    assert mask[1].nonzero().flatten().tolist() == list(range(8, 16))
    assert entries_of_blocks(torch.zeros(2, 0, dtype=torch.bool), 0, TINY).shape == (2, 0)


def test_a_pin_that_is_one_entry_late_is_seen() -> None:
    """`visible // size` instead of `(visible - 1) // size` pins a block in which nothing is visible."""
    scores = torch.tensor([1.0] * 40 + [-math.inf] * 8).bfloat16()
    right = candidate_blocks(scores, torch.tensor(40), TINY).kept
    wrong = candidate_blocks(scores, torch.tensor(41), TINY).kept
    assert right.nonzero().flatten().tolist() == [0, 1, 2, 4]
    assert not torch.equal(right, wrong)
