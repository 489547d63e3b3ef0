"""What a serving loop holds: the ranks of this process with their weights and caches, and one call per step.

The caller owns requests, block tables and state blocks (:mod:`v41_model.generation` is such a caller); a session
owns weights and cache memory and runs all ranks through a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from v41_config import ForwardMetadata, ModelConfig, ParallelLayout, cache_pools
from v41_config.cache_abi import MAX_BLOCK
from v41_goldens.capture import Capture
from v41_goldens.paged_cache import PagedCaches
from v41_goldens.rope_rows import RopeTables, rope_tables
from v41_loader import Checkpoint, rank_tensors
from v41_model.communicator import Communicator
from v41_model.errors import RequestError, SessionError
from v41_model.integer_checks import as_integer
from v41_model.local_world import LocalWorld
from v41_model.operators import Operators
from v41_model.rank_forward import RankModel
from v41_model.step_batch import StepBatch

__all__ = ["GroupOutput", "ModelSession"]


@dataclass(frozen=True)
class GroupOutput:
    """What a step gave one DP group.

    ``logits`` FP32, of each request's last row ``[B', V]`` in batch order, or of every packed row ``[T, V]`` where
    all were asked for; ``captures`` the TP ranks' records in rank order, empty unless asked for; ``metadata`` the
    lowered batch they belong to.
    """

    logits: Tensor
    all_logits: bool
    captures: tuple[Capture, ...]
    metadata: ForwardMetadata[Tensor]

    @property
    def last_logits(self) -> Tensor:
        """FP32 ``[B', V]``: the last row of each request that has rows in the step."""
        rows = self.metadata.logit_row_indices
        return self.logits[rows[rows >= 0].long()] if self.all_logits else self.logits


class ModelSession:
    """All ranks of a world, ready to step.

    A failure inside a step leaves caches in an unknown state: the session is then poisoned and refuses further steps
    with the reason. What is wrong with a batch itself is found before any rank runs and poisons nothing.
    """

    def __init__(self, ranks: Sequence[RankModel], world: LocalWorld, operators: Operators | None = None) -> None:
        self.config: ModelConfig = ranks[0].config
        self.world = world
        self.operators = operators or Operators()
        self._ranks = {model.rank: model for model in ranks}
        self._caches: dict[int, PagedCaches] = {}
        self._blocks: dict[str, int] = {}
        self._rope_tables: RopeTables | None = None
        self._max_tokens = 0
        self._failure: BaseException | None = None
        if sorted(self._ranks) != list(world.local_ranks):
            raise SessionError("ModelSession", sorted(self._ranks), f"one model for each of ranks {world.local_ranks}")

    @classmethod
    def open(
        cls,
        checkpoint: Checkpoint,
        layout: ParallelLayout,
        world: LocalWorld | None = None,
        operators: Operators | None = None,
    ) -> ModelSession:
        """Load every local rank's part of a checkpoint. ``world`` defaults to all ranks in this process.

        Errors: :class:`v41_config.LayoutError` when the layout does not divide the model; the loader's errors.
        """
        layout.check(checkpoint.config)
        world = world or LocalWorld(layout)
        ranks = [
            RankModel.from_tensors(checkpoint.config, layout, rank, rank_tensors(checkpoint, layout, rank))
            for rank in world.local_ranks
        ]
        return cls(ranks, world, operators)

    @property
    def layout(self) -> ParallelLayout:
        return self.world.layout

    def allocate(self, blocks: Mapping[str, int], max_tokens: int) -> None:
        """Cache memory for every rank, dropping what there was.

        ``blocks`` counts 128-row blocks per block table (:func:`v41_config.cache_pools` names them); ``max_tokens``
        is the longest request, and with it the RoPE tables' capacity. A poisoned session is usable again.

        Errors: :class:`SessionError` when the session is closed, a block table is missing, unknown or without blocks,
        or ``max_tokens`` is no length of the model; what there was is untouched then.
        """
        if not self._ranks:
            raise SessionError("ModelSession.allocate", "a closed session", "an open one")
        blocks = self._checked_blocks(blocks)
        longest = self.config.max_position_embeddings
        capacity = as_integer(max_tokens)
        if capacity is None or not 1 <= capacity <= longest:
            expected = f"1 <= max_tokens <= max_position_embeddings = {longest}"
            raise SessionError("ModelSession.allocate max_tokens", max_tokens, expected)
        tables = rope_tables(self.config, capacity)
        caches = {rank: PagedCaches.allocate(self.config, blocks) for rank in self._ranks}
        self._caches, self._blocks, self._rope_tables = caches, blocks, tables
        self._max_tokens, self._failure = capacity, None

    def _checked_blocks(self, blocks: Mapping[str, int]) -> dict[str, int]:
        known = dict.fromkeys(pool.block_table for pool in cache_pools(self.config))
        if set(blocks) != set(known):
            raise SessionError(
                "ModelSession.allocate blocks", sorted(blocks), f"a count for each of {', '.join(known)}"
            )
        checked = {}
        for table, given in blocks.items():
            count = as_integer(given)
            if count is None or not 1 <= count <= MAX_BLOCK:
                where = f"ModelSession.allocate blocks[{table}]"
                raise SessionError(where, given, f"an integer from 1 to {MAX_BLOCK}")
            checked[table] = count
        return checked

    def step(
        self,
        batches: Sequence[StepBatch],
        *,
        capacity: int | None = None,
        all_logits: bool = False,
        capture: bool = False,
    ) -> list[GroupOutput]:
        """Run one step: a batch for every DP group, idle ones included (:meth:`StepBatch.idle`).

        Prefill, chunked prefill, decode and mixtures are the same call. Logits are those of each request's last row
        in the step, or of every row with ``all_logits``. ``capacity`` reserves the slabs of that many rows per DP
        group; by default slabs follow each group's own rows.

        Errors: :class:`SessionError` when the session is poisoned or has no caches; what :meth:`StepBatch.lower`
        raises for a batch that does not fit, :class:`RequestError` for a request that outgrows ``max_tokens``;
        :class:`WorldError` from the ranks.
        """
        tables = self._ready(batches)
        lowered = [
            batch.lower(self.config, self.layout, dp_rank, capacity=capacity, pool_blocks=self._blocks)
            for dp_rank, batch in enumerate(batches)
        ]
        for dp_rank, (_, group) in enumerate(lowered):
            self._check_lengths(dp_rank, group.metadata)

        def rank_program(communicator: Communicator) -> tuple[Tensor, Capture | None]:
            token_ids, group = lowered[self.layout.dp_rank(communicator.rank)]
            recorder = Capture() if capture else None
            logits = self._ranks[communicator.rank].forward(
                communicator,
                token_ids,
                group,
                self._caches[communicator.rank],
                tables,
                operators=self.operators,
                all_logits=all_logits,
                capture=recorder,
            )
            return logits, recorder

        try:
            results = self.world.run(rank_program)
        except BaseException as error:
            self._failure = error
            raise
        outputs = []
        for _, group in lowered:
            ranks = [results[rank] for rank in group.mapping.ranks]
            captures = tuple(recorder for _, recorder in ranks if recorder is not None)
            outputs.append(GroupOutput(ranks[0][0], all_logits, captures, group.metadata))
        return outputs

    def close(self) -> None:
        """Release weights and caches; the session cannot be used again."""
        self._ranks.clear()
        self._caches.clear()
        self._rope_tables = None
        self._failure = SessionError("ModelSession", "a closed session", "an open one")

    def _check_lengths(self, dp_rank: int, metadata: ForwardMetadata[Tensor]) -> None:
        too_long = (metadata.new_kv_seq_lens > self._max_tokens).nonzero().flatten()
        if len(too_long):
            request = int(too_long[0])
            where = f"step batch, DP group {dp_rank}, request {request}"
            found = f"{int(metadata.new_kv_seq_lens[request])} tokens after the step"
            raise RequestError(where, found, f"at most the {self._max_tokens} that allocate was given")

    def _ready(self, batches: Sequence[StepBatch]) -> RopeTables:
        if self._failure is not None:
            raise SessionError(
                "ModelSession.step", str(self._failure) or repr(self._failure), "a session in which no step has failed"
            )
        if self._rope_tables is None:
            raise SessionError("ModelSession.step", "no caches", "a call of allocate first")
        if len(batches) != self.layout.dp:
            raise SessionError("ModelSession.step", f"{len(batches)} batches", f"one for each of dp={self.layout.dp}")
        return self._rope_tables
