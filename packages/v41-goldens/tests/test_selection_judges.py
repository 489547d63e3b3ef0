"""Validity of selections and candidate masks: the golden's are accepted, and each way to be wrong is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from v41_config import BLOCK_ROWS, TINY, AttentionMode, ForwardMetadata, ModelConfig
from v41_goldens import ATTENTION, Capture, LayerWeights, ReferenceEngine
from v41_goldens.errors import OperandError
from v41_goldens.judges import (
    FOREIGN_ENTRY,
    CandidateMaskVerdict,
    CutoffRule,
    JudgementError,
    SelectionVerdict,
    assert_candidate_blocks,
    assert_candidate_mask,
    assert_selection,
    judge_candidate_blocks,
    judge_candidate_mask,
    judge_selection,
    logical_entries,
)
from v41_goldens.top_k import select_positions

K, SIZE, KEEP = TINY.index_topk, TINY.candidate_block_size, TINY.candidate_topk_blocks
LENGTHS = (150, 3, 20)
FULL, REINDEX = TINY.layer_config(6), TINY.layer_config(8)


@dataclass
class Indexed:
    """What C1A Full and the Reindex layer behind it selected: three requests, 173 tokens."""

    topk: dict[int, Tensor]
    scores: dict[int, Tensor]
    rows: dict[int, Tensor]
    mask: Tensor
    blocks: Tensor
    visible: Tensor
    metadata: ForwardMetadata[Tensor]

    def judge(self, selection: Tensor, cutoff: CutoffRule | None = None, layer_id: int = 8) -> SelectionVerdict:
        candidates = self.mask if layer_id == REINDEX.layer_id else None
        return judge_selection(selection, self.scores[layer_id], self.visible, K, candidates=candidates,
                               cutoff=cutoff or CutoffRule())  # fmt: skip

    def judge_blocks(self, kept: Tensor, cutoff: CutoffRule | None = None) -> CandidateMaskVerdict:
        return judge_candidate_blocks(kept, self.scores[6], self.visible, TINY, cutoff or CutoffRule())


@pytest.fixture(scope="module")
def indexed(make_layer: Callable[[ModelConfig, int, int], LayerWeights]) -> Indexed:
    assert (FULL.mode, REINDEX.mode) == (AttentionMode.C1A_FULL, AttentionMode.C1A_REINDEX)
    capture = Capture()
    ctx = ReferenceEngine(TINY, None, 3, 150, shuffle_seed=3, fill_byte=0xFF).context([2, 0, 1], LENGTHS, capture)
    generator = torch.Generator().manual_seed(5)
    for layer in (FULL, REINDEX):
        x = torch.randn(sum(LENGTHS), TINY.hidden_size, generator=generator).bfloat16()
        ATTENTION[layer.mode](ctx, layer, make_layer(TINY, layer.layer_id, 3).attention, x)
    assert ctx.candidate_blocks is not None
    return Indexed(
        {i: capture.tensors[f"layer.{i:02d}.topk"] for i in (6, 8)},
        {i: capture.tensors[f"layer.{i:02d}.index_score"] for i in (6, 8)},
        {i: ctx.topk[i] for i in (6, 8)},
        capture.tensors["layer.06.candidate_mask"],
        ctx.candidate_blocks,
        ctx.metadata.compressed_lens[6],
        ctx.metadata,
    )


LAST = LENGTHS[0] - 1
"""The row of the last token of the longest request, which sees 150 entries in 19 blocks."""


def test_the_golden_selections_are_accepted(indexed: Indexed) -> None:
    for layer_id in (6, 8):
        verdict = indexed.judge(indexed.topk[layer_id], layer_id=layer_id)
        assert verdict
        assert (verdict.bad_rows, verdict.off_nominal_rows, verdict.first_index) == (0, 0, None)
        assert verdict.rows == sum(LENGTHS)
        assert verdict.chosen == int((indexed.topk[layer_id] >= 0).sum())
        assert verdict.worst_row is not None
        assert -math.inf < verdict.deficit <= 0
    assert_selection(indexed.topk[6], indexed.scores[6], indexed.visible, K, "layer 6")


def changed(indexed: Indexed, row: int, columns: dict[int, int], layer_id: int = 8) -> Tensor:
    selection = indexed.topk[layer_id].clone()
    for column, entry in columns.items():
        selection[row, column] = entry
    return selection


def outside_the_candidates(indexed: Indexed) -> Tensor:
    """The last token's last entry becomes the one of the highest number whose block was not kept, in its place."""
    selection = changed(indexed, LAST, {K - 1: int((~indexed.mask[LAST]).nonzero().max())})
    selection[LAST] = selection[LAST].sort().values
    return selection


WRONG_SELECTIONS: dict[str, tuple[str, int, Callable[[Indexed], Tensor]]] = {
    "duplicated": ("entries named twice, first at [149, 3]", 1,
                   lambda i: changed(i, LAST, {3: int(i.topk[8][LAST, 2])})),
    "first one duplicated": ("entries named twice, first at [5, 1]", 1, lambda i: changed(i, 5, {1: 0})),
    "non-causal": ("entries that the token does not see, first at [100, 15]", 1,
                   lambda i: changed(i, 100, {K - 1: 101})),
    "beyond all entries": ("entries that the token does not see, first at [100, 15]", 1,
                           lambda i: changed(i, 100, {K - 1: FOREIGN_ENTRY})),
    "outside the candidates": ("entries outside the candidates, first at [149, ", 1, outside_the_candidates),
    "descending": ("entries out of order, first at [149, 1]", 1,
                   lambda i: changed(i, LAST, {0: int(i.topk[8][LAST, 1]), 1: int(i.topk[8][LAST, 0])})),
    "hole": ("entries behind a -1, first at [5, 3]", 1, lambda i: changed(i, 5, {2: -1})),
    "too few": ("places left empty, first at [5, 5]", 1, lambda i: changed(i, 5, {5: -1})),
    "nothing": ("places left empty, first at [0, 0]", 173, lambda i: torch.full_like(i.topk[8], -1)),
    "stale sentinel": ("numbers below -1, first at [5, 15]", 1, lambda i: changed(i, 5, {K - 1: -7})),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_SELECTIONS)
def test_wrong_selections_are_rejected_for_their_own_reason(indexed: Indexed, name: str) -> None:
    problem, bad_rows, make = WRONG_SELECTIONS[name]
    selection = make(indexed)
    for cutoff in (CutoffRule(), CutoffRule("any"), CutoffRule("any", 1e30)):
        verdict = indexed.judge(selection, cutoff)
        assert not verdict
        assert problem in verdict.reasons[0]
        assert verdict.bad_rows == bad_rows
        assert str(list(verdict.first_index or ())).startswith(problem.split("first at ")[1])
    with pytest.raises(JudgementError, match=problem.split(",", maxsplit=1)[0]):
        assert_selection(selection, indexed.scores[8], indexed.visible, K, name, candidates=indexed.mask)


def test_a_worse_entry_is_rejected_unless_a_slack_covers_it(indexed: Indexed) -> None:
    """The last token's worst entry is exchanged for the best one left out."""
    scores, chosen = indexed.scores[6][LAST].float(), indexed.topk[6][LAST].long()
    left = scores.clone()
    left[chosen] = -math.inf
    worst, best_left = int(chosen[scores[chosen].argmin()]), int(left.argmax())
    deficit = float(scores[worst] - scores[best_left])
    assert deficit > 0
    selection = indexed.topk[6].clone()
    selection[LAST] = torch.cat([chosen[chosen != worst], torch.tensor([best_left])]).sort().values
    verdict = indexed.judge(selection, layer_id=6)
    assert not verdict
    assert "1 entries worse than one left out" in verdict.reasons[0]
    assert (verdict.worst_row, verdict.deficit, verdict.off_nominal_rows) == (LAST, deficit, 1)
    assert not indexed.judge(selection, CutoffRule("any", deficit * 0.99), layer_id=6)
    accepted = indexed.judge(selection, CutoffRule("any", deficit), layer_id=6)
    assert accepted
    assert accepted.off_nominal_rows == 1


def test_equal_scores_go_to_the_lower_index_or_to_any() -> None:
    scores = torch.tensor([[0.0, 2.0, 0.0, -0.0, 1.0, 0.0]])
    visible = torch.tensor([6])
    nominal, other, worse = torch.tensor([[0, 1, 4]]), torch.tensor([[1, 3, 4]]), torch.tensor([[0, 1, 2]])
    assert judge_selection(nominal, scores, visible, 3)
    by_index = judge_selection(other, scores, visible, 3)
    assert by_index.reasons == ("1 ties that do not take the lower index, first at [0, 1]",)
    any_tie = judge_selection(other, scores, visible, 3, cutoff=CutoffRule("any"))
    assert any_tie
    assert any_tie.off_nominal_rows == 1
    assert not judge_selection(worse, scores, visible, 3, cutoff=CutoffRule("any"))


@pytest.mark.parametrize("visible", [-5, 0, 1, K - 1, K, K + 1])
def test_short_contexts(visible: int) -> None:
    """As many entries as are visible, then -1; a negative count sees nothing."""
    scores = torch.rand(1, 40, generator=torch.Generator().manual_seed(visible)).bfloat16()
    count = torch.tensor([visible])
    right = select_positions(scores.where(torch.arange(40) < count.unsqueeze(1), -math.inf), K)
    verdict = judge_selection(right, scores, count, K)
    assert verdict
    assert verdict.chosen == max(0, min(visible, K))
    if verdict.chosen < K:
        longer = right.clone()
        longer[0, verdict.chosen] = max(visible, 0)
        assert not judge_selection(longer, scores, count, K)
    if verdict.chosen:
        shorter = right.clone()
        shorter[0, verdict.chosen - 1] = -1
        assert not judge_selection(shorter, scores, count, K)


def test_no_tokens_and_no_entries() -> None:
    empty = judge_selection(torch.zeros(0, K).int(), torch.zeros(0, 9), torch.zeros(0).int(), K)
    assert empty
    assert (empty.rows, empty.worst_row) == (0, None)
    nothing = torch.full((2, K), -1)
    scores, visible = torch.zeros(2, 0), torch.zeros(2).int()
    assert judge_selection(nothing, scores, visible, K)
    nothing[1, 0] = 0
    assert not judge_selection(nothing, scores, visible, K)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_reference_scores_must_be_finite(indexed: Indexed, value: float) -> None:
    scores = indexed.scores[6].clone()
    scores[40, 3] = value
    verdict = judge_selection(indexed.topk[6], scores, indexed.visible, K)
    assert "1 reference scores that are not finite in rows, first at [40, 0]" in verdict.reasons
    blocks = judge_candidate_blocks(indexed.blocks, scores, indexed.visible, TINY)
    assert "1 reference scores that are not finite in rows, first at [40, 0]" in blocks.reasons
    scores[40, 3], scores[40, 41:] = indexed.scores[6][40, 3], value
    assert judge_selection(indexed.topk[6], scores, indexed.visible, K), "nobody looks at what is not visible"
    assert judge_candidate_blocks(indexed.blocks, scores, indexed.visible, TINY)


def test_a_selection_of_another_kind_is_rejected(indexed: Indexed) -> None:
    right = indexed.topk[6]
    for selection in (right.float(), right[:, :-1], right[:-1], right.flatten()):
        assert "expected integers [173, 16], found torch." in indexed.judge(selection, layer_id=6).reasons[0]
    assert indexed.judge(right.long(), layer_id=6)


def test_a_reference_of_another_kind_is_a_typed_error(indexed: Indexed) -> None:
    scores, visible = indexed.scores[6], indexed.visible
    for operands in ((scores.int(), visible), (scores.flatten(), visible), (scores, visible[:-1]), (scores, scores)):
        with pytest.raises(OperandError):
            judge_selection(indexed.topk[6], *operands, K)
    for candidates in (indexed.mask.int(), indexed.mask[:, 1:]):
        with pytest.raises(OperandError):
            judge_selection(indexed.topk[6], scores, visible, K, candidates=candidates)
    with pytest.raises(OperandError, match="visible"):
        judge_candidate_blocks(indexed.blocks, scores, visible[:-1], TINY)
    for slack in (-1.0, math.nan, math.inf):
        with pytest.raises(OperandError, match="slack"):
            CutoffRule("any", slack)
    with pytest.raises(OperandError, match="slack"):
        CutoffRule("lower index", 0.5)


def test_physical_rows_become_logical_entries(indexed: Indexed) -> None:
    table, request = indexed.metadata.compressed_block_tables[6], indexed.metadata.token_to_req_indices
    for layer_id in (6, 8):
        assert torch.equal(logical_entries(indexed.rows[layer_id], table, request), indexed.topk[layer_id].long())
    foreign = indexed.rows[8].clone()
    other_request = int(table[1, 0]) * BLOCK_ROWS
    foreign[LAST, 4], foreign[LAST, 5], foreign[LAST, 6] = other_request, 2**31 - 1, -1
    entries = logical_entries(foreign, table, request)
    assert entries[LAST, 4:7].tolist() == [FOREIGN_ENTRY, FOREIGN_ENTRY, -1]
    assert "2 entries that the token does not see, first at [149, 4]" in indexed.judge(entries).reasons
    no_pages = logical_entries(indexed.rows[8], table[:, :0], request)
    assert torch.equal(no_pages >= 0, indexed.rows[8] >= 0)
    assert (no_pages[no_pages >= 0] == FOREIGN_ENTRY).all()


def test_freed_pages_are_nobodys_rows() -> None:
    table = torch.tensor([[7, -1, 2]])
    rows = torch.tensor([[7 * 128, 2 * 128 + 5, 3 * 128, -1]])
    assert logical_entries(rows, table, torch.tensor([0])).tolist() == [[0, 2 * 128 + 5, FOREIGN_ENTRY, -1]]


def test_the_golden_candidates_are_accepted(indexed: Indexed) -> None:
    verdict = indexed.judge_blocks(indexed.blocks)
    assert verdict
    assert (verdict.rows, verdict.bad_rows, verdict.off_nominal_rows) == (173, 0, 0)
    assert verdict.kept == int(indexed.blocks.sum())
    assert judge_candidate_mask(indexed.mask, indexed.scores[6], indexed.visible, TINY)
    assert_candidate_blocks(indexed.blocks, indexed.scores[6], indexed.visible, TINY, "blocks")
    assert_candidate_mask(indexed.mask, indexed.scores[6], indexed.visible, TINY, "mask")
    wider = torch.nn.functional.pad(indexed.blocks, (0, 5))
    assert indexed.judge_blocks(wider), "a table with room for more blocks"
    wider[3, -1] = True
    assert "1 blocks without a visible entry, first at [3, 23]" in indexed.judge_blocks(wider).reasons


def moved(indexed: Indexed, row: int, out: int | None, into: int | None) -> Tensor:
    kept = indexed.blocks.clone()
    if out is not None:
        assert kept[row, out]
        kept[row, out] = False
    if into is not None:
        assert not kept[row, into]
        kept[row, into] = True
    return kept


def ranked(indexed: Indexed, row: int) -> list[int]:
    """Blocks of a row that has more than KEEP of them, from its pinned one down."""
    visible = int(indexed.visible[row])
    scores = indexed.scores[6][row, :visible].float()
    best = [float(part.max()) for part in scores.split(SIZE)]
    best[-1] = math.inf
    return sorted(range(len(best)), key=lambda block: (-best[block], block))


WRONG_BLOCKS: dict[str, tuple[str, Callable[[Indexed], Tensor]]] = {
    "newest not pinned": ("newest blocks left out",
                          lambda i: moved(i, LAST, ranked(i, LAST)[0], ranked(i, LAST)[KEEP])),
    "worse block": ("blocks worse than one left out",
                    lambda i: moved(i, LAST, ranked(i, LAST)[KEEP - 1], ranked(i, LAST)[-1])),
    "one too many": ("5 blocks in rows that keep too many", lambda i: moved(i, LAST, None, ranked(i, LAST)[KEEP])),
    "one too few": ("16 blocks left out though there is room", lambda i: moved(i, LAST, ranked(i, LAST)[1], None)),
    "not visible": ("blocks without a visible entry", lambda i: moved(i, 0, None, 1)),
    "nothing kept": ("newest blocks left out", lambda i: torch.zeros_like(i.blocks)),
    "everything kept": ("blocks without a visible entry", lambda i: torch.ones_like(i.blocks)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_BLOCKS)
def test_wrong_candidates_are_rejected_for_their_own_reason(indexed: Indexed, name: str) -> None:
    problem, make = WRONG_BLOCKS[name]
    kept = make(indexed)
    verdict = indexed.judge_blocks(kept)
    assert not verdict
    assert any(problem in reason for reason in verdict.reasons), verdict
    assert verdict.off_nominal_rows == verdict.bad_rows > 0
    if name in ("newest not pinned", "worse block", "not visible"):
        assert list(verdict.first_index or ()) in (kept != indexed.blocks).nonzero().tolist()
    mask = kept.repeat_interleave(SIZE, dim=1)[:, : indexed.mask.shape[1]]
    assert any(
        problem in reason for reason in judge_candidate_mask(mask, indexed.scores[6], indexed.visible, TINY).reasons
    )
    with pytest.raises(JudgementError, match="layer 6: expected the best 4 blocks of 8 entries"):
        assert_candidate_blocks(kept, indexed.scores[6], indexed.visible, TINY, "layer 6")


def test_equal_blocks_go_to_the_lower_one_or_to_any() -> None:
    """Seven visible blocks of equal score: the newest and the first three."""
    scores, visible = torch.ones(1, 7 * SIZE), torch.tensor([7 * SIZE])
    lowest = torch.tensor([[True, True, True, False, False, False, True]])
    highest = torch.tensor([[False, False, False, True, True, True, True]])
    assert judge_candidate_blocks(lowest, scores, visible, TINY)
    verdict = judge_candidate_blocks(highest, scores, visible, TINY)
    assert verdict.reasons == ("3 ties that do not take the lower block, first at [0, 3]",)
    assert judge_candidate_blocks(highest, scores, visible, TINY, CutoffRule("any"))
    scores[0, 0] = 1.5
    assert not judge_candidate_blocks(highest, scores, visible, TINY, CutoffRule("any", 0.4))
    assert judge_candidate_blocks(highest, scores, visible, TINY, CutoffRule("any", 0.5))


def test_a_block_kept_in_part_is_rejected(indexed: Indexed) -> None:
    mask = indexed.mask.clone()
    block = ranked(indexed, LAST)[1]
    mask[LAST, block * SIZE + 3] = False
    verdict = judge_candidate_mask(mask, indexed.scores[6], indexed.visible, TINY)
    assert verdict.reasons == (f"1 blocks kept in part, first at [{LAST}, {block}]",)
    with pytest.raises(JudgementError, match="blocks kept in part"):
        assert_candidate_mask(mask, indexed.scores[6], indexed.visible, TINY, "mask")


def test_candidates_of_another_kind_are_rejected(indexed: Indexed) -> None:
    for kept in (indexed.blocks.int(), indexed.blocks[:, :-1], indexed.blocks[:-1], indexed.blocks.flatten()):
        assert "expected torch.bool [173, 19 or more], found" in indexed.judge_blocks(kept).reasons[0]
    for mask in (indexed.mask.int(), indexed.mask[:, :-1]):
        reasons = judge_candidate_mask(mask, indexed.scores[6], indexed.visible, TINY).reasons
        assert "expected torch.bool [173, 150], found" in reasons[0]
