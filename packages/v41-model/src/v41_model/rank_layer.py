"""One layer of one rank (model.md sections 5 and 18).

mHC-pre and norm -> AllGather ``[T_local, D]`` -> attention on this rank's heads -> FP32 partial -> ReduceScatter ->
mHC-post -> mHC-pre and norm -> MoE over the EP group -> mHC-post, in the sharded wiring, where a rank holds its slab
of the residual; :mod:`v41_model.wiring` has the other one.

The residual ``[T_local, HC, D]`` and its pre-mix stay on their rank. A DP group without tokens skips the attention
half together; no rank ever skips MoE.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from v41_config import DpGroupMetadata, LayerConfig, LocalRows, ModelConfig, SlabError, TokenMapping
from v41_goldens.forward_context import ForwardContext
from v41_goldens.weights import HyperConnectionWeights, LayerWeights
from v41_model.collective_log import Site
from v41_model.communicator import Communicator
from v41_model.expert_parallel import expert_parallel_moe
from v41_model.operator_checks import checked
from v41_model.operators import Operators
from v41_model.wiring import TpBoundary, Wiring

__all__ = ["AttentionHalf", "RankStep", "ResidualStreams", "attention_half", "sequence_parallel_layer"]


@dataclass(frozen=True)
class ResidualStreams:
    """What a layer hands to the next: ``x_hc`` BF16 ``[T_local, HC, D]`` and ``pre_mix`` FP32 ``[T_local, HC]``.

    T_local is a rank's slab; in the replicated wiring it is all of the group's rows.
    """

    x_hc: LocalRows[Tensor]
    pre_mix: LocalRows[Tensor]

    def __post_init__(self) -> None:
        self.x_hc.require_same_side(self.pre_mix)


@dataclass(frozen=True)
class AttentionHalf:
    """What the attention half hands to the MoE half, and what led to it.

    ``attn_in`` BF16 ``[T, D]`` are the rows that attention took; ``attn_out`` BF16 ``[T_local, D]`` what the group
    gave for this rank's rows. Both are None where the group has no tokens.
    """

    streams: ResidualStreams
    attn_in: Tensor | None = None
    attn_out: LocalRows[Tensor] | None = None


@dataclass(frozen=True)
class RankStep:
    """One step of one rank: what its group runs, which rows it holds, and what its operators share.

    ``attention`` is the golden context of the group's packed batch (pages, RoPE rows, selections); ``expert_owners``
    INT64 ``[E]``.

    Errors: :class:`v41_config.SlabError` when positions and gathered rows would come from different batches.
    """

    config: ModelConfig
    group: DpGroupMetadata[Tensor]
    attention: ForwardContext
    expert_owners: Tensor
    communicator: Communicator
    operators: Operators
    wiring: Wiring = Wiring.SHARDED

    def __post_init__(self) -> None:
        if self.attention.metadata is not self.group.metadata:
            raise SlabError("attention context", "metadata of another batch", "the metadata of the group's own rows")

    @property
    def mapping(self) -> TokenMapping:
        """Which packed rows each rank of the group holds."""
        return self.group.mapping

    @cached_property
    def boundary(self) -> TpBoundary:
        """What crosses the TP group, and how."""
        return self.wiring.boundary(self.group.mapping, self.communicator.rank, self.communicator)

    def at(self, layer: LayerConfig) -> RankStep:
        """This step with the operators of one layer."""
        operators = self.operators.at(layer.layer_id)
        if operators is self.operators:
            return self
        self.attention.stages = operators
        return replace(self, operators=operators)

    def record(self, layer: LayerConfig, name: str, rows: Tensor) -> None:
        """Capture one tensor, where somebody captures."""
        self.attention.record(layer, name, rows)

    def record_own(self, layer: LayerConfig, name: str, rows: LocalRows[Tensor]) -> None:
        """Capture the tokens of this rank's slab of the residual's rows, where somebody captures."""
        if self.attention.capture is not None:
            self.record(layer, name, self.boundary.own(rows).tokens)


def sequence_parallel_layer(
    step: RankStep, layer: LayerConfig, weights: LayerWeights, streams: ResidualStreams
) -> ResidualStreams:
    """Attention half, then MoE half. ``weights`` hold this rank's heads, output groups and experts."""
    step = step.at(layer)
    half = step.operators.around(attention_half)(step, layer, weights, streams)
    return _moe_half(step, layer, weights, half.streams)


def attention_half(
    step: RankStep, layer: LayerConfig, weights: LayerWeights, streams: ResidualStreams
) -> AttentionHalf:
    """The streams after attention, with the pre-mix that the MoE half collapses with."""
    ops, mapping = step.operators, step.mapping
    pre, post, comb = _mixes(step, layer, "attn", streams.x_hc, weights.hc_attn)
    if mapping.active == 0:  # every rank of the group sees the same count
        return AttentionHalf(ResidualStreams(streams.x_hc, pre))
    attn_in = _sublayer_input(step, streams, weights.attn_norm)
    gathered = step.boundary.gather(attn_in, Site("attention input", layer.layer_id)).tokens
    step.record(layer, "attn_in", gathered)
    partial = ops.attention(layer.mode)(step.attention, layer, weights.attention, gathered)
    checked(f"attn_{layer.mode.value}", partial, gathered.shape, torch.float32)
    attn_out = step.boundary.reduce(partial, Site("attention output", layer.layer_id)).map_tokens(Tensor.bfloat16)
    step.record_own(layer, "attn_out", attn_out)
    x_hc = _mhc_post(step, attn_out, streams.x_hc, post, comb)
    return AttentionHalf(ResidualStreams(x_hc, pre), gathered, attn_out)


def _moe_half(step: RankStep, layer: LayerConfig, weights: LayerWeights, streams: ResidualStreams) -> ResidualStreams:
    ops = step.operators
    pre, post, comb = _mixes(step, layer, "ffn", streams.x_hc, weights.hc_ffn)
    moe_in = step.boundary.own(_sublayer_input(step, streams, weights.ffn_norm))
    step.record(layer, "moe_in", moe_in.tokens)
    moe = ops.around(expert_parallel_moe)(
        moe_in.tokens, weights.moe, step.expert_owners, step.config, step.communicator, ops, layer.layer_id
    )
    step.record(layer, "router_ids", moe.routes.ids)
    step.record(layer, "router_weights", moe.routes.weights)
    step.record(layer, "router_score_plus_bias", moe.routes.biased_scores)
    step.record(layer, "shared_out", moe.shared)
    step.record(layer, "moe_out", moe.out)
    if step.mapping.active == 0:
        return ResidualStreams(streams.x_hc, pre)
    slab = step.mapping.pad(moe.out, step.communicator.rank)
    moe_out = step.boundary.rejoin(slab, Site("MoE output", layer.layer_id))
    x_hc = _mhc_post(step, moe_out, streams.x_hc, post, comb)
    step.record_own(layer, "X", x_hc)
    step.record_own(layer, "pre_mix", pre)
    return ResidualStreams(x_hc, pre)


def _mhc_post(
    step: RankStep, y: LocalRows[Tensor], x_hc: LocalRows[Tensor], post: LocalRows[Tensor], comb: LocalRows[Tensor]
) -> LocalRows[Tensor]:
    """The streams after a sublayer gave ``y``: BF16 ``[T_local, HC, D]``."""

    def expand(out: Tensor, streams: Tensor, *mixes: Tensor) -> Tensor:
        return checked("mhc_post", step.operators.mhc_post(out, streams, *mixes), streams.shape)

    return y.map_tokens(expand, x_hc, post, comb)


def _sublayer_input(step: RankStep, streams: ResidualStreams, norm: Tensor) -> LocalRows[Tensor]:
    """Collapse with the pre-mix of the sublayer before, then norm: BF16 ``[T_local, D]``."""
    ops, eps = step.operators, step.config.rms_norm_eps

    def collapse(x_hc: Tensor, pre_mix: Tensor) -> Tensor:
        shape = (x_hc.shape[0], x_hc.shape[2])
        collapsed = checked("mhc_pre", ops.mhc_pre(x_hc, pre_mix), shape)
        return checked("rms_norm", ops.rms_norm(collapsed, norm, eps), shape)

    return streams.x_hc.map_tokens(collapse, streams.pre_mix)


def _mixes(
    step: RankStep, layer: LayerConfig, sublayer: str, x_hc: LocalRows[Tensor], weights: HyperConnectionWeights
) -> tuple[LocalRows[Tensor], LocalRows[Tensor], LocalRows[Tensor]]:
    """``pre [T_local, HC]``, ``post [T_local, HC]``, ``comb [T_local, HC, HC]`` of a sublayer, FP32, padding zero."""
    tokens, lanes = x_hc.tokens, x_hc.tensor.shape[1]
    coefficients = step.operators.mhc_mixes(tokens, weights, step.config)
    shapes = ((len(tokens), lanes), (len(tokens), lanes), (len(tokens), lanes, lanes))
    names = ("pre", "post", "comb")
    rows = []
    for name, value, shape in zip(names, coefficients, shapes, strict=True):
        rows.append(step.boundary.pad(checked(f"mhc_mixes {name}", value, shape, torch.float32)))
        step.record_own(layer, f"hc_{sublayer}_{name}", rows[-1])
    pre, post, comb = rows
    return pre, post, comb
