"""One layer of one rank, sequence parallel (model.md sections 5 and 18).

local mHC-pre and norm -> AllGather ``[T_local, D]`` -> attention on this rank's heads -> FP32 partial ->
ReduceScatter -> local mHC-post -> local mHC-pre and norm -> MoE over the EP group -> local mHC-post.

The residual ``[T_local, HC, D]`` and its pre-mix stay on their rank. A DP group without tokens skips the attention
half together; no rank ever skips MoE.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from v41_config import DpGroupMetadata, GatheredRows, LayerConfig, LocalRows, ModelConfig, SlabError, TokenMapping
from v41_goldens.forward_context import ForwardContext
from v41_goldens.weights import HyperConnectionWeights, LayerWeights
from v41_model.collective_log import Site
from v41_model.communicator import Communicator
from v41_model.expert_parallel import expert_parallel_moe
from v41_model.operators import Operators

__all__ = ["RankStep", "ResidualStreams", "sequence_parallel_layer"]


@dataclass(frozen=True)
class ResidualStreams:
    """What a layer hands to the next: ``x_hc`` BF16 ``[T_local, HC, D]`` and ``pre_mix`` FP32 ``[T_local, HC]``."""

    x_hc: LocalRows[Tensor]
    pre_mix: LocalRows[Tensor]

    def __post_init__(self) -> None:
        self.x_hc.require_same_side(self.pre_mix)


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

    def __post_init__(self) -> None:
        if self.attention.metadata is not self.group.metadata:
            raise SlabError("attention context", "metadata of another batch", "the metadata of the group's own rows")

    @property
    def mapping(self) -> TokenMapping:
        """Which packed rows each rank of the group holds."""
        return self.group.mapping

    def at(self, layer: LayerConfig) -> RankStep:
        """This step with the operators of one layer."""
        operators = self.operators.at(layer.layer_id)
        if operators is self.operators:
            return self
        self.attention.stages = operators
        return replace(self, operators=operators)

    def record(self, layer: LayerConfig, name: str, rows: Tensor) -> None:
        """Capture this rank's token rows of one tensor, where somebody captures."""
        self.attention.record(layer, name, rows)


def sequence_parallel_layer(
    step: RankStep, layer: LayerConfig, weights: LayerWeights, streams: ResidualStreams
) -> ResidualStreams:
    """Attention half, then MoE half. ``weights`` hold this rank's heads, output groups and experts."""
    step = step.at(layer)
    x_hc, attn_pre = _attention_half(step, layer, weights, streams)
    return _moe_half(step, layer, weights, ResidualStreams(x_hc, attn_pre))


def _attention_half(
    step: RankStep, layer: LayerConfig, weights: LayerWeights, streams: ResidualStreams
) -> tuple[LocalRows[Tensor], LocalRows[Tensor]]:
    """The streams after attention, and the pre-mix that the MoE half collapses with."""
    ops, mapping, communicator = step.operators, step.mapping, step.communicator
    pre, post, comb = _mixes(step, layer, "attn", streams.x_hc, weights.hc_attn)
    if mapping.active == 0:  # every rank of the group sees the same count
        return streams.x_hc, pre
    attn_in = _sublayer_input(step, streams, weights.attn_norm)
    gathered = GatheredRows(
        mapping, communicator.all_gather_tokens(attn_in.tensor, Site("attention input", layer.layer_id))
    )
    step.record(layer, "attn_in", gathered.tokens)
    partial = ops.attention(layer.mode)(step.attention, layer, weights.attention, gathered.tokens)
    padded = partial.new_zeros((mapping.padded_rows, *partial.shape[1:]))
    padded[: mapping.active] = partial
    summed = communicator.reduce_scatter_tokens(padded, Site("attention output", layer.layer_id))
    attn_out = LocalRows(mapping, communicator.rank, summed.bfloat16())
    step.record(layer, "attn_out", attn_out.tokens)
    return attn_out.map_tokens(ops.mhc_post, streams.x_hc, post, comb), pre


def _moe_half(step: RankStep, layer: LayerConfig, weights: LayerWeights, streams: ResidualStreams) -> ResidualStreams:
    ops = step.operators
    pre, post, comb = _mixes(step, layer, "ffn", streams.x_hc, weights.hc_ffn)
    moe_in = _sublayer_input(step, streams, weights.ffn_norm)
    step.record(layer, "moe_in", moe_in.tokens)
    moe = expert_parallel_moe(
        moe_in.tokens, weights.moe, step.expert_owners, step.config, step.communicator, ops, layer.layer_id
    )
    step.record(layer, "router_ids", moe.routes.ids)
    step.record(layer, "router_weights", moe.routes.weights)
    step.record(layer, "router_score_plus_bias", moe.routes.biased_scores)
    step.record(layer, "shared_out", moe.shared)
    step.record(layer, "moe_out", moe.out)
    moe_out = step.mapping.pad(moe.out, step.communicator.rank)
    x_hc = moe_out.map_tokens(ops.mhc_post, streams.x_hc, post, comb)
    step.record(layer, "X", x_hc.tokens)
    step.record(layer, "pre_mix", pre.tokens)
    return ResidualStreams(x_hc, pre)


def _sublayer_input(step: RankStep, streams: ResidualStreams, norm: Tensor) -> LocalRows[Tensor]:
    """Collapse with the pre-mix of the sublayer before, then norm: BF16 ``[T_local, D]``."""
    ops, eps = step.operators, step.config.rms_norm_eps
    return streams.x_hc.map_tokens(lambda x, mix: ops.rms_norm(ops.mhc_pre(x, mix), norm, eps), streams.pre_mix)


def _mixes(
    step: RankStep, layer: LayerConfig, sublayer: str, x_hc: LocalRows[Tensor], weights: HyperConnectionWeights
) -> tuple[LocalRows[Tensor], LocalRows[Tensor], LocalRows[Tensor]]:
    """``pre [T_local, HC]``, ``post [T_local, HC]``, ``comb [T_local, HC, HC]`` of a sublayer, FP32, padding zero."""
    coefficients = step.operators.mhc_mixes(x_hc.tokens, weights, step.config)
    for name, value in zip(("pre", "post", "comb"), coefficients, strict=True):
        step.record(layer, f"hc_{sublayer}_{name}", value)
    pre, post, comb = (step.mapping.pad(value, step.communicator.rank) for value in coefficients)
    return pre, post, comb
