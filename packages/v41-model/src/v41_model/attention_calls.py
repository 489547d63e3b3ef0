"""Indexers and whole attention modes in the terms of the ABI: operands out of a forward's context, and back into it.

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
from v41_goldens.weights import AttentionWeights
from v41_model.operator_call import (
    Arguments,
    OperatorCalls,
    compressor_weights,
    index_key_weights,
    packed_weight,
    pool,
    rope_rows,
)
from v41_model.step_limits import StepLimits

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
        self.mode = mode
        self.operator = f"{phase}_attn_{mode.value}"

    def applies(self, ctx: ForwardContext, _layer: LayerConfig, _weights: AttentionWeights, _x: Tensor) -> bool:
        """Decode is a step in which every request has tokens stored and runs no more rows than a decode may."""
        meta, most = ctx.metadata, StepLimits().decode_rows_per_request
        decodes = bool((meta.kv_seq_lens > 0).all()) and bool((meta.query_lens <= most).all())
        return decodes == self.decode

    def arguments(self, ctx: ForwardContext, layer: LayerConfig, weights: AttentionWeights, x: Tensor) -> Arguments:
        meta, source = ctx.metadata, layer.kv_source
        given: Arguments = {
            "x": x,
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
            given |= self._source_operands(ctx, layer, weights, source)
        if weights.indexer is not None:
            given |= packed_weight("index_wq_b", weights.indexer.wq_b)
            given["index_weights_proj"] = weights.indexer.weights_proj
        if layer.index_source is not None and not layer.owns_index:
            given["topk_rows"] = ctx.topk[layer.index_source]
        return _own(self.operator, given)

    @staticmethod
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
            given |= {
                "state_block_table": meta.state_block_tables[source],
                "state_cache": ctx.caches.state[source],
            }
        return given

    @property
    def _out(self) -> list[str]:
        return [tensor.name for tensor in find_operator(self.operator).tensors if tensor.direction == "out"]

    def outputs(self, given: tuple[Any, ...], result: Any) -> tuple[Tensor, ...]:
        ctx, layer, *_ = given
        by_name = {"output_partial": result, "kept_blocks": _kept_blocks(ctx).clone()}
        if layer.owns_index:
            by_name["topk_rows"] = ctx.topk[layer.layer_id]
        return tuple(by_name[name] for name in self._out)

    def restored(self, given: tuple[Any, ...], result: Any, values: Sequence[Tensor]) -> Any:
        ctx, layer, *_ = given
        by_name = dict(zip(self._out, values, strict=True))
        if "kept_blocks" in by_name:
            _restore_candidates(ctx, layer, [by_name["kept_blocks"]])
        if layer.owns_index:
            ctx.topk[layer.layer_id] = by_name["topk_rows"]
        return by_name["output_partial"]


def _calls(form: _Indexer | _Attention, entry: str) -> OperatorCalls:
    whole = isinstance(form, _Attention)
    return OperatorCalls(form.operator, entry, form.arguments, form.applies, form.outputs, form.restored, whole)


ATTENTION_CALLS: dict[str, OperatorCalls] = {
    call.operator: call
    for call in (
        *(_calls(_Indexer(mode), "select_entries") for mode in INDEXED_MODES),
        *(_calls(_Attention(phase, mode), f"attn_{mode.value}")
          for phase in ("prefill", "decode") for mode in AttentionMode),
    )
}  # fmt: skip
"""By the ABI's name."""
