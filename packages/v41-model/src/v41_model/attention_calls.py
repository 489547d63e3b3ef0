"""Indexers, whole attention modes and half layers in the terms of the ABI.

Operands come out of a forward's context, results go back into it.

Their goldens leave part of what the contract declares in the context (selections, candidate blocks) and write caches;
:mod:`v41_model.operator_calls` has the operators whose operands are all arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from v41_config import AttentionMode, LayerConfig, find_operator
from v41_goldens.attention_stages import physical_rows
from v41_goldens.forward_context import ForwardContext
from v41_goldens.indexer import IndexQueries
from v41_goldens.judges import logical_entries
from v41_goldens.weights import AttentionWeights, LayerWeights
from v41_model.operator_call import (
    Arguments,
    OperatorCalls,
    compressor_weights,
    index_key_weights,
    packed_weight,
    pool,
    rope_rows,
)
from v41_model.rank_layer import AttentionHalf, RankStep, ResidualStreams, attention_half
from v41_model.step_limits import StepLimits
from v41_model.wiring import Wiring

__all__ = ["ATTENTION_CALLS"]

INDEXED_MODES = (AttentionMode.C2A_FULL, AttentionMode.C1A_FULL, AttentionMode.C1A_REINDEX)


def _kept_blocks(ctx: ForwardContext) -> Tensor:
    """Bool ``[T, blocks]`` of at least one block; none is kept where no entry is visible yet."""
    if ctx.candidate_blocks is not None:
        return ctx.candidate_blocks
    positions = ctx.metadata.position_ids
    return torch.zeros(len(positions), 1, dtype=torch.bool, device=positions.device)


def _own(operator: str, arguments: Arguments) -> Arguments:
    """What the operator's contract names."""
    names = {tensor.name for tensor in find_operator(operator).tensors if tensor.direction != "out"}
    return {name: value for name, value in arguments.items() if name in names}


def _index_operands(ctx: ForwardContext, layer: LayerConfig) -> Arguments:
    meta, source = ctx.metadata, layer.kv_source
    if source is None:
        return {}
    return {
        **pool("index_key", ctx.caches.index_key[source]),
        "compressed_block_table": meta.compressed_block_tables[source],
        "compressed_lens": meta.compressed_lens[source],
        "token_to_req_indices": meta.token_to_req_indices,
        "kept_blocks": _kept_blocks(ctx),
    }


def _attention_operands(ctx: ForwardContext, layer: LayerConfig, weights: AttentionWeights) -> Arguments:
    """What any mode takes beside its input."""
    meta, source = ctx.metadata, layer.kv_source
    given: Arguments = {
        **rope_rows(*ctx.query_rope(layer)),
        "window_slots": meta.window_slots,
        "window_indices": meta.window_indices,
        **pool("window_kv", ctx.caches.window[layer.layer_id]),
        "q_norm": weights.q_norm,
        "kv_norm": weights.kv_norm,
        "attn_sink": weights.attn_sink,
        "query_start_loc": meta.query_start_loc,
        "position_ids": meta.position_ids,
        **_index_operands(ctx, layer),
    }
    for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b"):
        given |= packed_weight(name, getattr(weights, name))
    if source is not None:
        given |= pool("compressed_kv", ctx.caches.compressed[source])
    if layer.owns_kv and source is not None:
        given |= _source_operands(ctx, layer, weights, source)
    if weights.indexer is not None:
        given |= packed_weight("index_wq_b", weights.indexer.wq_b)
        given["index_weights_proj"] = weights.indexer.weights_proj
    if layer.index_source is not None and not layer.owns_index:
        given["topk_rows"] = ctx.topk[layer.index_source]
    return given


def _source_operands(ctx: ForwardContext, layer: LayerConfig, weights: AttentionWeights, source: int) -> Arguments:
    meta, compressor, keys = ctx.metadata, weights.compressor, weights.index_keys
    assert compressor is not None
    assert keys is not None
    given: Arguments = {
        **compressor_weights(compressor),
        **index_key_weights(keys),
        **rope_rows(*ctx.compressed_rope(layer), "compressed_"),
        "compressed_slots": meta.compressed_slots[source],
        "index_slots": meta.index_slots[source],
    }
    if compressor.wgate is not None:
        given |= {"state_block_table": meta.state_block_tables[source], "state_cache": ctx.caches.state[source]}
    return given


def _decodes(ctx: ForwardContext) -> bool:
    """Decode is a step in which every request has tokens stored and runs no more rows than a decode may."""
    meta, most = ctx.metadata, StepLimits().decode_rows_per_request
    return bool((meta.kv_seq_lens > 0).all()) and bool((meta.query_lens <= most).all())


def _out(operator: str) -> list[str]:
    return [tensor.name for tensor in find_operator(operator).tensors if tensor.direction == "out"]


def _selected(ctx: ForwardContext, layer: LayerConfig) -> dict[str, Tensor]:
    """What the layer's attention left in the context, by the contract's names."""
    selected = {"kept_blocks": _kept_blocks(ctx).clone()}
    if layer.owns_index:
        selected["topk_rows"] = ctx.topk[layer.layer_id]
    return selected


def _restore_selected(ctx: ForwardContext, layer: LayerConfig, by_name: dict[str, Tensor]) -> None:
    if "kept_blocks" in by_name:
        _restore_candidates(ctx, layer, [by_name["kept_blocks"]])
    if layer.owns_index:
        ctx.topk[layer.layer_id] = by_name["topk_rows"]


class _Indexer:
    """``select_entries(ctx, layer, queries)`` of one mode."""

    def __init__(self, mode: AttentionMode) -> None:
        self.mode = mode
        self.operator = f"hierarchical_sparse_indexer_{mode.value}"

    def applies(self, _ctx: ForwardContext, layer: LayerConfig, _queries: IndexQueries) -> bool:
        return layer.mode is self.mode

    def arguments(self, ctx: ForwardContext, layer: LayerConfig, queries: IndexQueries) -> Arguments:
        given = {"index_q": queries.q, "index_weights": queries.weights, **_index_operands(ctx, layer)}
        return _own(self.operator, given)

    def outputs(self, given: tuple[Any, ...], result: Any) -> tuple[Tensor, ...]:
        ctx, layer, _ = given
        rows = physical_rows(ctx, layer, result)
        return (_kept_blocks(ctx).clone(), rows) if layer.makes_candidates else (rows,)

    def restored(self, given: tuple[Any, ...], result: Any, values: Sequence[Tensor]) -> Any:
        ctx, layer, _ = given
        _restore_candidates(ctx, layer, values)
        table = ctx.metadata.compressed_block_tables[layer.kv_source]
        return logical_entries(values[-1], table, ctx.metadata.token_to_req_indices).int()


def _restore_candidates(ctx: ForwardContext, layer: LayerConfig, values: Sequence[Tensor]) -> None:
    if layer.makes_candidates and ctx.candidate_blocks is not None:
        ctx.candidate_blocks = values[0]


class _Attention:
    """``attn_*(ctx, layer, weights, x)`` of one mode in one phase."""

    def __init__(self, phase: str, mode: AttentionMode) -> None:
        self.decode = phase == "decode"
        self.operator = f"{phase}_attn_{mode.value}"

    def applies(self, ctx: ForwardContext, _layer: LayerConfig, _weights: AttentionWeights, _x: Tensor) -> bool:
        return _decodes(ctx) == self.decode

    def arguments(self, ctx: ForwardContext, layer: LayerConfig, weights: AttentionWeights, x: Tensor) -> Arguments:
        return _own(self.operator, {"x": x, **_attention_operands(ctx, layer, weights)})

    def outputs(self, given: tuple[Any, ...], result: Any) -> tuple[Tensor, ...]:
        ctx, layer, *_ = given
        by_name = {"output_partial": result, **_selected(ctx, layer)}
        return tuple(by_name[name] for name in _out(self.operator))

    def restored(self, given: tuple[Any, ...], result: Any, values: Sequence[Tensor]) -> Any:
        ctx, layer, *_ = given
        by_name = dict(zip(_out(self.operator), values, strict=True))
        _restore_selected(ctx, layer, by_name)
        return by_name["output_partial"]


class _HalfLayer:
    """``attention_half(step, layer, weights, streams)`` of one mode in one phase and one wiring."""

    def __init__(self, phase: str, mode: AttentionMode, wiring: Wiring) -> None:
        self.decode = phase == "decode"
        self.mode, self.wiring = mode, wiring
        self.operator = f"{phase}_{mode.value}{'_sharded' if wiring is Wiring.SHARDED else ''}"

    def applies(self, step: RankStep, layer: LayerConfig, *_: object) -> bool:
        own = layer.mode is self.mode and step.wiring is self.wiring
        return own and step.mapping.active > 0 and _decodes(step.attention) == self.decode

    def arguments(
        self, step: RankStep, layer: LayerConfig, weights: LayerWeights, streams: ResidualStreams
    ) -> Arguments:
        connection = weights.hc_attn
        given = {
            "x_hc": streams.x_hc.tokens,
            "incoming_pre_mix": streams.pre_mix.tokens,
            "hc_attn_fn": connection.fn,
            "hc_attn_base": connection.base,
            "hc_attn_scale": connection.scale,
            "attn_norm": weights.attn_norm,
            **_attention_operands(step.attention, layer, weights.attention),
        }
        return _own(self.operator, given)

    def outputs(self, given: tuple[Any, ...], result: AttentionHalf) -> tuple[Tensor, ...]:
        step, layer, *_ = given
        assert result.attn_in is not None
        assert result.attn_out is not None
        by_name = {
            "attn_input": result.attn_in,
            "attn_output": result.attn_out.tokens,
            "x_hc_out": result.streams.x_hc.tokens,
            "next_pre_mix": result.streams.pre_mix.tokens,
            **_selected(step.attention, layer),
        }
        return tuple(by_name[name] for name in _out(self.operator))

    def restored(self, given: tuple[Any, ...], _: AttentionHalf, values: Sequence[Tensor]) -> AttentionHalf:
        step, layer, *_rest = given
        by_name = dict(zip(_out(self.operator), values, strict=True))
        _restore_selected(step.attention, layer, by_name)
        x_hc, pre_mix, attn_out = (step.boundary.pad(by_name[n]) for n in ("x_hc_out", "next_pre_mix", "attn_output"))
        return AttentionHalf(ResidualStreams(x_hc, pre_mix), by_name["attn_input"], attn_out)


def _calls(form: _Indexer | _Attention | _HalfLayer, entry: str, joins: str = "") -> OperatorCalls:
    composed = not isinstance(form, _Indexer)
    return OperatorCalls(
        form.operator, entry, form.arguments, form.applies, form.outputs, form.restored, composed, joins
    )


ATTENTION_CALLS: dict[str, OperatorCalls] = {
    call.operator: call
    for call in (
        *(_calls(_Indexer(mode), "select_entries") for mode in INDEXED_MODES),
        *(_calls(_Attention(phase, mode), f"attn_{mode.value}")
          for phase in ("prefill", "decode") for mode in AttentionMode),
        *(_calls(_HalfLayer(phase, mode, wiring), attention_half.__name__, "TP")
          for phase in ("prefill", "decode") for mode in AttentionMode for wiring in Wiring),
    )
}  # fmt: skip
"""By the ABI's name."""
