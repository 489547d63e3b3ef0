"""One step of a model on all ranks, for its account of communication: real or with transport alone.

The transport run is the model's own rank code, entry to exit, with operators that compute nothing: they hand rows of
the right form on, and the gate chooses experts at random. What the collectives carry is what they would carry in the
whole model; the values mean nothing. So FLASH's dimensions can be measured without FLASH's weights.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from v41_config import BLOCK_ROWS, FLASH, DpGroupMetadata, ModelConfig, ParallelLayout, cache_pools
from v41_goldens.gate import GateOutput
from v41_goldens.paged_cache import PagedCaches
from v41_goldens.rope_rows import RopeTables, rope_tables
from v41_goldens.weights import LayerWeights, ModelWeights
from v41_model.checkpoint_weights import StoredWeights, load_rank_model
from v41_model.collective_log import CollectiveKind, CollectiveRecord, Site
from v41_model.communicator import Communicator
from v41_model.expert_parallel import expert_owners
from v41_model.operators import Operators
from v41_model.rank_forward import RankModel
from v41_model.step_batch import StepBatch
from v41_model.wiring import Wiring
from v41_model.world import World

__all__ = ["STEPS", "MeasuredRank", "MeasuredStep", "StepShape", "TrafficModel", "flash_at_two_layers", "measure_step"]


@dataclass(frozen=True)
class StepShape:
    """A step in which every DP group runs ``requests`` requests of ``rows`` rows after ``stored`` tokens.

    ``all_logits`` asks for logits of every row, as the verification of drafts does, else of each request's last one.
    """

    requests: int
    rows: int
    stored: int
    all_logits: bool = False

    @property
    def group_rows(self) -> int:
        """Rows of a DP group, T."""
        return self.requests * self.rows

    @property
    def logit_rows(self) -> int:
        """Rows of a DP group that get logits."""
        return self.group_rows if self.all_logits else self.requests

    def batch(self, config: ModelConfig, random: np.random.Generator) -> StepBatch:
        """Random token ids; each request has pages of its own."""
        length = self.stored + self.rows
        starts = np.arange(self.requests + 1) * self.rows

        def table(entries: int) -> np.ndarray[Any, np.dtype[np.int32]]:
            pages = max(1, -(-entries // BLOCK_ROWS))
            return np.arange(self.requests * pages, dtype=np.int32).reshape(self.requests, pages)

        sources = {layer: config.compress_ratios[layer] for layer in config.kv_source_layer_ids}
        return StepBatch(
            token_ids=random.integers(0, config.vocab_size, self.group_rows, dtype=np.int32),
            query_start_loc=starts,
            kv_seq_lens=np.full(self.requests, self.stored),
            window_block_table=table(length),
            compressed_block_tables={ratio: table(length // ratio) for ratio in sorted(set(sources.values()))},
            state_block_tables={layer: table(1) for layer, ratio in sources.items() if ratio > 1},
        )

    def blocks(self, config: ModelConfig) -> dict[str, int]:
        """128-row blocks per block table, at least as many as the tables of :meth:`batch` name."""
        pages = max(1, -(-(self.stored + self.rows) // BLOCK_ROWS))
        return {pool.block_table: self.requests * pages for pool in cache_pools(config)}


STEPS: Mapping[str, StepShape] = {
    "small-decode": StepShape(requests=4, rows=1, stored=1024),
    "decode-192": StepShape(requests=32, rows=6, stored=1024, all_logits=True),
    "prefill-4096": StepShape(requests=4, rows=1024, stored=0),
}
"""A small decode batch, the batch of 32 requests with a target and five draft rows, and the largest prefill."""


def flash_at_two_layers() -> ModelConfig:
    """FLASH with a window layer and a compressed one: every size of a layer, and of entry and exit, is FLASH's."""
    fields = {name: getattr(FLASH, name) for name in ModelConfig.model_fields}
    fields |= {"num_hidden_layers": 2, "compress_ratios": (0, 1), "kv_source_layer_ids": (1,)}
    fields |= {"index_source_layer_ids": (1,), "candidate_source_layer_id": 1}
    return ModelConfig.model_validate({**fields, **dict.fromkeys(("engram", "drafting", "vision", "image_token_id"))})


@dataclass(frozen=True)
class TrafficModel:
    """The ranks of this process, with what a step of theirs needs."""

    config: ModelConfig
    ranks: Mapping[int, RankModel]
    operators: Operators
    real: bool

    @classmethod
    def transport(cls, config: ModelConfig, layout: ParallelLayout, ranks: Sequence[int]) -> TrafficModel:
        """Rank code without weights."""
        random = torch.Generator().manual_seed(0)
        row = torch.randn(1, config.hidden_size, generator=random).bfloat16()
        shard = row.expand(config.vocab_size // layout.tp, config.hidden_size)
        weights = ModelWeights(embed=shard, layers=_NoLayers(config.num_hidden_layers), norm=row[0], head=shard)
        owners = expert_owners(config, layout)
        models = {rank: RankModel(config, layout, rank, weights, owners) for rank in ranks}
        return cls(config, models, _transport_operators(random), real=False)

    @classmethod
    def open(cls, checkpoint: StoredWeights, layout: ParallelLayout, ranks: Sequence[int]) -> TrafficModel:
        """The whole model. Errors: :class:`v41_config.LayoutError`, and the loader's."""
        models = {rank: load_rank_model(checkpoint, layout, rank) for rank in ranks}
        return cls(checkpoint.config, models, Operators(), real=True)


@dataclass(frozen=True)
class MeasuredRank:
    """A rank's collectives in one step, in order."""

    rank: int
    records: tuple[CollectiveRecord, ...]
    received_routes: tuple[int, ...]
    """Rows its experts received, layer by layer."""


@dataclass(frozen=True)
class MeasuredStep:
    """A step in one wiring: every rank's account, the slabs of each DP group, and the elapsed seconds of all."""

    shape: StepShape
    wiring: Wiring
    ranks: tuple[MeasuredRank, ...]
    groups: tuple[DpGroupMetadata[Tensor], ...]
    seconds: float


def measure_step(world: World, model: TrafficModel, shape: StepShape, wiring: Wiring) -> MeasuredStep:
    """Run ``shape`` once on every DP group. Every process of the world calls this.

    The caches of a real model hold zeros for what is stored: their values change no shape.
    """
    config, layout = model.config, world.layout
    random = np.random.default_rng(0)
    lowered = [shape.batch(config, random).lower(config, layout, dp_rank) for dp_rank in range(layout.dp)]
    caches = {rank: PagedCaches.allocate(config, shape.blocks(config)) for rank in model.ranks} if model.real else {}
    tables = rope_tables(config, shape.stored + shape.rows) if model.real else cast(RopeTables, None)

    def rank_program(communicator: Communicator) -> list[tuple[Any, ...]]:
        token_ids, group = lowered[layout.dp_rank(communicator.rank)]
        rank_model = replace(model.ranks[communicator.rank], wiring=wiring)
        rank_caches = cast(PagedCaches, caches.get(communicator.rank))  # transport reads none
        rank_model.forward(
            communicator,
            token_ids,
            group,
            rank_caches,
            tables,
            operators=model.operators,
            all_logits=shape.all_logits,
        )
        return [_plain(record) for record in communicator.log.records]

    began = time.perf_counter()
    results = world.run(rank_program)
    seconds = time.perf_counter() - began
    ranks = []
    for rank, plain in enumerate(results):
        records = tuple(_record(fields) for fields in plain)
        received = tuple(r.received[0][0] for r in records if r.site.step == "expert dispatch")
        ranks.append(MeasuredRank(rank, records, received))
    return MeasuredStep(shape, wiring, tuple(ranks), tuple(group for _, group in lowered), seconds)


def _plain(record: CollectiveRecord) -> tuple[Any, ...]:
    """A record as numbers and text, which can go to other processes."""
    site = (record.site.step, record.site.layer)
    amounts = (record.sent, record.received, record.bytes_sent, record.bytes_received, record.seconds)
    return (record.kind.value, site, *amounts)


def _record(plain: tuple[Any, ...]) -> CollectiveRecord:
    kind, site, *amounts = plain
    return CollectiveRecord(CollectiveKind(kind), Site(*site), *amounts)


class _NoWeight:
    """Stands where operators that compute nothing are handed weights."""

    def __getattr__(self, name: str) -> _NoWeight:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class _NoLayers(Sequence[LayerWeights]):
    def __init__(self, layers: int) -> None:
        self._layers = layers

    def __len__(self) -> int:
        return self._layers

    def __getitem__(self, index: Any) -> Any:
        return _NoWeight()


def _transport_operators(random: torch.Generator) -> Operators:
    def mixes(x_hc: Tensor, _: object, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
        lanes = torch.zeros(len(x_hc), config.hc_mult)
        return lanes, lanes, torch.zeros(len(x_hc), config.hc_mult, config.hc_mult)

    def gate(x: Tensor, _: object, __: object, config: ModelConfig) -> GateOutput:
        scores = torch.rand(len(x), config.n_routed_experts, generator=random)
        weights, ids = scores.topk(config.num_experts_per_tok)
        return GateOutput(ids.int(), weights, scores)

    def attention(_: object, __: object, ___: object, x: Tensor) -> Tensor:
        return x.float()

    return Operators().replace(
        rms_norm=lambda x, *_: x,
        mhc_mixes=mixes,
        mhc_pre=lambda x_hc, _: x_hc[:, 0],
        mhc_post=lambda _, x_hc, *__: x_hc,
        gate=gate,
        routed_experts=lambda rows, *_: rows,
        shared_expert=lambda x, *_: x,
        combine=lambda _, __, shared: shared,
        fp32_linear=lambda rows, head: torch.zeros(len(rows), len(head)),
        **{name: attention for name in Operators.names() if name.startswith("attn_")},
    )
