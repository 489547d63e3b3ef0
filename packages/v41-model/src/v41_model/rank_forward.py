"""The whole text model of one rank: its weights, and a step from token ids to logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from v41_config import DpGroupMetadata, LocalRows, ModelConfig, ParallelLayout
from v41_goldens.capture import Capture
from v41_goldens.forward_context import ForwardContext
from v41_goldens.paged_cache import PagedCaches
from v41_goldens.rope_rows import RopeRows, RopeTables
from v41_goldens.weights import ModelWeights
from v41_model.communicator import Communicator
from v41_model.embedding import embed_tokens
from v41_model.expert_parallel import expert_owners
from v41_model.layer_capture import COMPRESSOR_STATE
from v41_model.lm_head import final_norm, lm_head
from v41_model.operator_checks import checked
from v41_model.operators import Operators
from v41_model.rank_layer import RankStep, ResidualStreams, sequence_parallel_layer
from v41_model.wiring import Wiring

__all__ = ["RankModel"]


@dataclass(frozen=True)
class RankModel:
    """A rank's part of the model: its heads, output groups, vocabulary rows and experts, the rest replicated.

    ``owners`` INT64 ``[E]`` is the rank of each routed expert; ``wiring`` is the same on all ranks.
    """

    config: ModelConfig
    layout: ParallelLayout
    rank: int
    weights: ModelWeights
    owners: Tensor
    wiring: Wiring = Wiring.SHARDED

    @classmethod
    def from_tensors(
        cls, config: ModelConfig, layout: ParallelLayout, rank: int, tensors: Mapping[str, Tensor]
    ) -> RankModel:
        """A rank from its tensors: global checkpoint names, this rank's shards."""
        weights = ModelWeights.from_tensors(config, tensors)
        return cls(config, layout, rank, weights, expert_owners(config, layout, weights.norm.device))

    def forward(
        self,
        communicator: Communicator,
        token_ids: Tensor,
        group: DpGroupMetadata[Tensor],
        caches: PagedCaches,
        rope_tables: RopeTables,
        *,
        operators: Operators,
        all_logits: bool = False,
        capture: Capture | None = None,
    ) -> Tensor:
        """Run one step of this rank's DP group.

        ``token_ids`` INT32 ``[T]`` and ``group`` are the packed batch and its slabs, equal on the group's ranks; T
        may be 0.
        ``caches`` are this rank's own; inside a TP group their contents are equal, because all ranks read all keys.
        Returns FP32 logits, equal on all ranks of the group:
        ``[T, V]`` with ``all_logits``, else ``[B', V]`` of the last row of each request that has rows, in batch
        order. Both wirings give the same bits, and capture the same rows: those of the rank's slab.
        """
        communicator.log.begin_step()
        config = self.config
        rope = RopeRows(rope_tables, operators.materialize_rope_rows)
        context = ForwardContext(config, group.metadata, caches, rope, capture=capture, stages=operators)
        step = RankStep(config, group, context, self.owners, communicator, operators, self.wiring)
        streams = self._entry(step, token_ids)
        for layer in config.layers:
            streams = sequence_parallel_layer(step, layer, self.weights.layers[layer.layer_id], streams)
        self._record_compressor_state(step)
        return self._exit(step, streams, all_logits)

    def _entry(self, step: RankStep, token_ids: Tensor) -> ResidualStreams:
        operators, lanes = step.operators, self.config.hc_mult
        embedded = embed_tokens(token_ids, self.weights.embed, self.config, step.boundary, operators)
        _record_own(step, "embed_out", embedded)
        x_hc, pre_mix = operators.input_pack(embedded.tokens, lanes)
        shape = (len(embedded.tokens), lanes, embedded.tokens.shape[1])
        checked("input_pack x_hc", x_hc, shape)
        checked("input_pack pre_mix", pre_mix, shape[:2], torch.float32)
        return ResidualStreams(step.boundary.pad(x_hc), step.boundary.pad(pre_mix))

    def _exit(self, step: RankStep, streams: ResidualStreams, all_logits: bool) -> Tensor:
        if step.mapping.active == 0:
            return torch.zeros(0, self.config.vocab_size, device=streams.x_hc.tensor.device)
        collapsed, normed = final_norm(streams.x_hc, streams.pre_mix, self.weights.norm, self.config, step.operators)
        _record_own(step, "final.collapsed", collapsed)
        _record_own(step, "final.norm_out", normed)
        last_rows = step.attention.metadata.logit_row_indices
        logit_rows = None if all_logits else last_rows[last_rows >= 0]
        logits = lm_head(normed, self.weights.head, logit_rows, step.boundary, step.communicator, step.operators)
        step.attention.record(None, "logits", logits)
        return logits

    def _record_compressor_state(self, step: RankStep) -> None:
        """Record the state rings of this step's requests, which the caches would overwrite in the next one."""
        for layer in self.config.layers:
            blocks = step.attention.metadata.state_block_tables.get(layer.layer_id)
            if blocks is not None and step.attention.capture is not None:
                step.record(layer, COMPRESSOR_STATE, step.attention.caches.state[layer.layer_id][blocks[:, 0].long()])


def _record_own(step: RankStep, name: str, rows: LocalRows[Tensor]) -> None:
    if step.attention.capture is not None:
        step.attention.record(None, name, step.boundary.own(rows).tokens)
