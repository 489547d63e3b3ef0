"""Attention whose selection may differ from the golden's: first the selection, then the output that it implies."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from v41_config import LayerConfig
from v41_goldens.attention_stages import AttentionStages, attend, physical_rows, project_queries
from v41_goldens.capture import Capture, layer_key
from v41_goldens.errors import OperandError
from v41_goldens.fast_weights import exact_attention
from v41_goldens.forward_context import ForwardContext
from v41_goldens.indexer import index_queries, select_entries
from v41_goldens.judges.cutoff import CutoffRule
from v41_goldens.judges.row_bounds import ROW_BOUNDS, RowBounds, RowBoundsVerdict, judge_row_bounds
from v41_goldens.judges.selection import SelectionVerdict, judge_selection
from v41_goldens.judges.verdict import Verdict
from v41_goldens.weights import AttentionWeights

ANY_TIE = CutoffRule(ties="any")
"""Exact scores, but any of several equal ones: what an output may be judged under a selection of its own for."""


@dataclass(frozen=True, kw_only=True, repr=False)
class SelectedAttentionVerdict(Verdict):
    """`output` is None where the selection is rejected: there is no reference for it then.

    `rederived` tells whether the selection is another than the golden's, so that the golden's output is not the
    reference.
    """

    selection: SelectionVerdict
    output: RowBoundsVerdict | None
    rederived: bool

    @property
    def statistics(self) -> str:
        found = f"selection: {self.selection.statistics}"
        return found if self.output is None else f"{found}; output: {self.output.statistics}"


def reference_index_scores(ctx: ForwardContext, layer: LayerConfig, weights: AttentionWeights, x: Tensor) -> Tensor:
    """The golden's scores BF16 `[T, n]` of a layer's own selection: -inf outside what is visible and allowed.

    Args:
        ctx: as the golden of this layer left it; not changed.
        x: BF16 `[T, D]`, the layer's attention input.

    Raises:
        OperandError: a layer without a selection of its own.
    """
    if weights.indexer is None or not layer.owns_index:
        raise OperandError(f"layer {layer.layer_id}", layer.mode.title, "an index source, with its indexer weights")
    capture = Capture()
    blocks = None if layer.makes_candidates else ctx.candidate_blocks
    alone = dataclasses.replace(ctx, capture=capture, candidate_blocks=blocks, stages=AttentionStages())
    exact = exact_attention(weights)
    qr, _ = project_queries(alone, layer, exact, x)
    assert exact.indexer is not None
    queries = index_queries(qr, x, exact.indexer, *alone.query_rope(layer), alone.config)
    select_entries(alone, layer, queries)
    return capture.tensors.get(layer_key(layer.layer_id, "index_score"), x.new_empty(len(x), 0))


def rederive_attention(
    ctx: ForwardContext, layer: LayerConfig, weights: AttentionWeights, x: Tensor, entries: Tensor, parts: int = 1
) -> Tensor:
    """A layer's output under somebody's selection: FP32 `[T, D]`, from the reference's caches and weights.

    Nothing of what is judged but the selection reaches it: neither caches nor outputs.

    Args:
        ctx: as the golden of this layer left it; not changed.
        x: BF16 `[T, D]`, the layer's attention input.
        entries: integers `[T, k]`, logical entries of each token's request, -1 behind them.
        parts: see `o_proj`.

    Raises:
        OperandError: an entry that its token does not see, or a layer without compressed KV.
    """
    if layer.index_source is None:
        raise OperandError(f"layer {layer.layer_id}", layer.mode.title, "a mode with compressed KV")
    topk = {**ctx.topk, layer.index_source: physical_rows(ctx, layer, entries)}
    alone = dataclasses.replace(ctx, capture=None, injected={}, topk=topk, stages=AttentionStages())
    exact = exact_attention(weights)
    _, q = project_queries(alone, layer, exact, x)
    return attend(alone, layer, exact, q, parts)


def judge_selected_attention(
    output: Tensor,
    selection: Tensor,
    ctx: ForwardContext,
    layer: LayerConfig,
    weights: AttentionWeights,
    x: Tensor,
    *,
    parts: int = 1,
    cutoff: CutoffRule = ANY_TIE,
    bounds: RowBounds = ROW_BOUNDS,
) -> SelectedAttentionVerdict:
    """A selection that `judge_selection` accepts, with the output that follows from it by `judge_row_bounds`.

    Where the selection is another than the golden's but accepted, so is only the output that follows from it: the
    golden's own output is wrong then.

    Args:
        output: FP32 (partials summed) or BF16 `[T, D]`.
        selection: INT32 or INT64 `[T, index_topk]`, logical entries (physical rows: `logical_entries`).
        ctx: as the golden of this layer left it; not changed.
        x: BF16 `[T, D]`, the layer's attention input.
        parts: see `o_proj`.
        cutoff: which selections are accepted.
        bounds: what the error of an output row may be.

    Raises:
        OperandError: a layer without a selection of its own, or an output of another dtype.
    """
    if output.dtype not in (torch.float32, torch.bfloat16):
        raise OperandError("judge_selected_attention output", output.dtype, "float32 or bfloat16")
    scores = reference_index_scores(ctx, layer, weights, x)
    assert layer.kv_source is not None
    visible = ctx.metadata.compressed_lens[layer.kv_source]
    selected = judge_selection(selection, scores, visible, ctx.config.index_topk, cutoff=cutoff)
    rule = f"{selected.rule}; then {bounds}"
    reasons = tuple(f"selection: {reason}" for reason in selected.reasons)
    if reasons:
        return SelectedAttentionVerdict(rule=rule, reasons=reasons, selection=selected, output=None, rederived=False)
    expected = rederive_attention(ctx, layer, weights, x, selection, parts).to(output.dtype)
    verdict = judge_row_bounds(output, expected, bounds=bounds)
    reasons = tuple(f"output: {reason}" for reason in verdict.reasons)
    rederived = selected.off_nominal_rows > 0
    return SelectedAttentionVerdict(rule=rule, reasons=reasons, selection=selected, output=verdict, rederived=rederived)


def assert_selected_attention(
    output: Tensor,
    selection: Tensor,
    ctx: ForwardContext,
    layer: LayerConfig,
    weights: AttentionWeights,
    x: Tensor,
    name: str,
    *,
    parts: int = 1,
    cutoff: CutoffRule = ANY_TIE,
    bounds: RowBounds = ROW_BOUNDS,
) -> None:
    """Raise `JudgementError` unless `judge_selected_attention` accepts the layer called `name`."""
    judge_selected_attention(
        output, selection, ctx, layer, weights, x, parts=parts, cutoff=cutoff, bounds=bounds
    ).require(name)
