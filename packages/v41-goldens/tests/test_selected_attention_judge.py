"""An output is judged under the selection that it was computed with, from the reference's own caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from v41_config import TINY, LayerConfig, ModelConfig
from v41_goldens import ATTENTION, Capture, ForwardContext, LayerWeights, ReferenceEngine
from v41_goldens.errors import OperandError
from v41_goldens.judges import (
    BY_INDEX,
    CutoffRule,
    JudgementError,
    assert_equal_bits,
    assert_selected_attention,
    cache_tensors,
    judge_selected_attention,
    logical_entries,
    rederive_attention,
    reference_index_scores,
    storage_snapshot,
)
from v41_goldens.weights import AttentionWeights

TOKENS = 90
K = TINY.index_topk


@dataclass
class Layer:
    """One index source's attention as its golden left it, and a selection that differs in equal scores only."""

    ctx: ForwardContext
    config: LayerConfig
    weights: AttentionWeights
    x: Tensor
    output: Tensor
    selection: Tensor
    alternative: Tensor
    rows: Tensor

    @property
    def rest(self) -> tuple[ForwardContext, LayerConfig, AttentionWeights, Tensor]:
        return self.ctx, self.config, self.weights, self.x


def other_ties(scores: Tensor, selection: Tensor) -> tuple[Tensor, Tensor]:
    """In every row with a tie at the cutoff, the tied entry of the lowest index goes and the highest one comes."""
    other, changed = selection.clone(), list[int]()
    for row in range(len(selection)):
        chosen = selection[row][selection[row] >= 0].long()
        left = torch.ones(scores.shape[1], dtype=torch.bool)
        left[chosen] = False
        cutoff = scores[row][chosen].min() if len(chosen) == K else torch.tensor(torch.inf)
        equal = (left & (scores[row] == cutoff)).nonzero().flatten()
        if len(equal):
            out = chosen[scores[row][chosen] == cutoff][0]
            other[row] = torch.cat([chosen[chosen != out], equal[-1:]]).sort().values
            changed.append(row)
    return other, torch.tensor(changed)


@pytest.fixture(scope="module", params=[2, 6, 8], ids=["C2A Full", "C1A Full", "C1A Reindex"])
def layer(request: pytest.FixtureRequest, make_layer: Callable[[ModelConfig, int, int], LayerWeights]) -> Layer:
    ctx = ReferenceEngine(TINY, None, 2, TOKENS, shuffle_seed=1, fill_byte=0xFF).context([1, 0], [TOKENS - 9, 9])
    generator = torch.Generator().manual_seed(4)
    wanted = TINY.layer_config(request.param)
    for config in [TINY.layer_config(i) for i in TINY.index_source_layer_ids if i <= request.param]:
        weights = make_layer(TINY, config.layer_id, 2).attention
        assert weights.indexer is not None
        # A head weight of zero is a score of zero: heads that see little make ties frequent.
        sparse = weights.indexer.weights_proj * (torch.arange(TINY.index_n_heads) < 1).unsqueeze(1)
        weights = replace(weights, indexer=replace(weights.indexer, weights_proj=sparse))
        x = torch.randn(TOKENS, TINY.hidden_size, generator=generator).bfloat16()
        ctx.capture = capture = Capture()
        output = ATTENTION[config.mode](ctx, config, weights, x)
    assert config == wanted
    selection = capture.tensors[f"layer.{wanted.layer_id:02d}.topk"]
    scores = capture.tensors[f"layer.{wanted.layer_id:02d}.index_score"]
    assert_equal_bits(reference_index_scores(ctx, wanted, weights, x), scores, "scores")
    ctx.capture = None
    alternative, rows = other_ties(scores, selection)
    assert len(rows) >= 5, "ties at the cutoff"
    return Layer(ctx, wanted, weights, x, output, selection, alternative, rows)


def test_the_golden_is_accepted_under_its_own_selection(layer: Layer) -> None:
    before = storage_snapshot(layer.ctx.caches)
    kept, topk = layer.ctx.candidate_blocks, dict(layer.ctx.topk)
    kept_before = None if kept is None else kept.clone()
    for output in (layer.output, layer.output.bfloat16()):
        verdict = judge_selected_attention(output, layer.selection, *layer.rest, cutoff=BY_INDEX)
        assert verdict
        assert not verdict.rederived
        assert verdict.output is not None
        assert verdict.output.errors is not None
        assert (verdict.output.errors.relative_l2, verdict.output.errors.rows) == (0.0, TOKENS)
    assert_selected_attention(layer.output, layer.selection, *layer.rest, "layer")
    assert_equal_bits(rederive_attention(*layer.rest, layer.selection), layer.output, "derived again")
    for name, tensor in cache_tensors(layer.ctx.caches).items():
        assert_equal_bits(tensor, before[name], name)
    assert layer.ctx.topk == topk
    assert layer.ctx.candidate_blocks is kept
    if kept is not None and kept_before is not None:
        assert_equal_bits(kept, kept_before, "candidates")


def test_the_physical_rows_of_the_context_are_the_same_selection(layer: Layer) -> None:
    source = layer.config.kv_source
    assert source is not None
    metadata = layer.ctx.metadata
    rows = layer.ctx.topk[layer.config.layer_id]
    entries = logical_entries(rows, metadata.compressed_block_tables[source], metadata.token_to_req_indices)
    assert judge_selected_attention(layer.output, entries, *layer.rest)


def test_an_alternative_selection_is_accepted_with_its_own_output_only(layer: Layer) -> None:
    theirs = rederive_attention(*layer.rest, layer.alternative)
    verdict = judge_selected_attention(theirs, layer.alternative, *layer.rest)
    assert verdict
    assert verdict.rederived
    assert verdict.selection.off_nominal_rows == len(layer.rows)
    assert_selected_attention(theirs, layer.alternative, *layer.rest, "layer")

    nominal = judge_selected_attention(layer.output, layer.alternative, *layer.rest)
    assert not nominal, "the golden's output does not follow from this selection"
    assert nominal.selection
    assert nominal.output is not None
    assert nominal.output.errors is not None
    assert 0 < nominal.output.errors.bad_rows <= len(layer.rows)
    with pytest.raises(JudgementError, match=r"layer: .*output: \d+ of 90 rows are beyond a bound"):
        assert_selected_attention(layer.output, layer.alternative, *layer.rest, "layer")
    swapped = judge_selected_attention(theirs, layer.selection, *layer.rest)
    assert not swapped, "nor this output from the golden's selection"


def test_by_index_no_alternative_is_accepted(layer: Layer) -> None:
    theirs = rederive_attention(*layer.rest, layer.alternative)
    verdict = judge_selected_attention(theirs, layer.alternative, *layer.rest, cutoff=BY_INDEX)
    assert not verdict
    assert verdict.output is None
    assert "selection: " in verdict.reasons[0]
    assert "ties that do not take the lower index" in verdict.reasons[0]


def test_a_rejected_selection_has_no_reference(layer: Layer) -> None:
    """Not even with the output that would follow from it."""
    row = int(layer.rows[0])
    worse = layer.selection.clone()
    scores = reference_index_scores(*layer.rest)[row]
    best = int(scores[worse[row].long()].argmax())
    lowest = scores.where(scores > -torch.inf, torch.inf).argmin()
    worse[row, best] = lowest
    worse[row] = worse[row].sort().values
    output = rederive_attention(*layer.rest, worse)
    verdict = judge_selected_attention(output, worse, *layer.rest, cutoff=CutoffRule("any", 1e-6))
    assert not verdict
    assert verdict.output is None
    assert all(reason.startswith("selection: ") for reason in verdict.reasons)
    with pytest.raises(JudgementError, match=r"layer: .*selection: "):
        assert_selected_attention(output, worse, *layer.rest, "layer")


def test_the_reference_does_not_come_from_what_is_judged(layer: Layer) -> None:
    """An output that is wrong in one element, under the golden's selection and under another one."""
    for selection in (layer.selection, layer.alternative):
        output = rederive_attention(*layer.rest, selection)
        row = int(layer.rows[-1])
        output[row, 3] += 0.06 * output[row].square().mean().sqrt() + 1e-5
        verdict = judge_selected_attention(output, selection, *layer.rest)
        assert not verdict
        assert verdict.output is not None
        assert verdict.output.errors is not None
        assert verdict.output.errors.first_index == (row, 3)


def test_partials_are_derived_in_the_same_number_of_parts(layer: Layer) -> None:
    output = rederive_attention(*layer.rest, layer.alternative, parts=4)
    verdict = judge_selected_attention(output, layer.alternative, *layer.rest, parts=4)
    assert verdict.output is not None
    assert verdict.output.errors is not None
    assert verdict.output.errors.relative_l2 == 0.0


def test_what_has_no_selection_of_its_own_is_a_typed_error(layer: Layer) -> None:
    reuse, swa = TINY.layer_config(3), TINY.layer_config(0)
    for config in (reuse, swa):
        with pytest.raises(OperandError, match="an index source"):
            judge_selected_attention(layer.output, layer.selection, layer.ctx, config, layer.weights, layer.x)
    with pytest.raises(OperandError, match="compressed KV"):
        rederive_attention(layer.ctx, swa, layer.weights, layer.x, layer.selection)
    with pytest.raises(OperandError, match="float32 or bfloat16"):
        judge_selected_attention(layer.output.double(), layer.selection, *layer.rest)
    invisible = layer.selection.clone()
    invisible[0, 0] = 1
    with pytest.raises(OperandError, match="visible to the token"):
        rederive_attention(*layer.rest, invisible)


def test_a_reuse_layer_is_derived_from_the_selection_it_is_given(
    layer: Layer, make_layer: Callable[[ModelConfig, int, int], LayerWeights]
) -> None:
    config = next(c for c in TINY.layers if c.index_source == layer.config.layer_id and not c.owns_index)
    weights = make_layer(TINY, config.layer_id, 2).attention
    output = ATTENTION[config.mode](layer.ctx, config, weights, layer.x)
    assert_equal_bits(rederive_attention(layer.ctx, config, weights, layer.x, layer.selection), output, "reuse")
    other = rederive_attention(layer.ctx, config, weights, layer.x, layer.alternative)
    assert not torch.equal(other, output)
