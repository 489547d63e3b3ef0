"""What a serving loop holds: the ranks of this process with their weights and caches, and one call per step.

The caller owns requests, block tables and state blocks (:mod:`v41_model.generation` is such a caller); a session
owns weights and cache memory, runs all ranks through a step, and knows how many tokens it has stored. docs/serving.md
is the contract.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from v41_config import CapacityPlan, ForwardMetadata, ModelConfig, ParallelLayout
from v41_config.cache_abi import STATE_TABLE
from v41_goldens.capture import Capture
from v41_goldens.paged_cache import PagedCaches
from v41_goldens.rope_rows import RopeTables, rope_tables
from v41_model.cache_budget import CacheBudget
from v41_model.checkpoint_weights import StoredWeights, load_rank_model
from v41_model.communicator import Communicator
from v41_model.errors import RequestError, SessionError
from v41_model.integer_checks import as_integer
from v41_model.local_world import LocalWorld
from v41_model.operators import Operators
from v41_model.rank_forward import RankModel
from v41_model.step_batch import StepBatch
from v41_model.step_limits import StepLimits
from v41_model.stored_tokens import StoredTokens
from v41_model.wiring import Wiring
from v41_model.world import World

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
    with the reason, until it is allocated anew. What is wrong with a batch itself is found before any rank runs and
    poisons nothing.
    """

    def __init__(
        self,
        ranks: Sequence[RankModel],
        world: World,
        operators: Operators | None = None,
        limits: StepLimits | None = None,
    ) -> None:
        self.config: ModelConfig = ranks[0].config
        self.world = world
        self.operators = operators or Operators()
        self.limits = limits or StepLimits()
        self._ranks = {model.rank: model for model in ranks}
        self._memory: _Memory | None = None
        self._failure: BaseException | None = None
        if sorted(self._ranks) != list(world.local_ranks):
            raise SessionError("ModelSession", sorted(self._ranks), f"one model for each of ranks {world.local_ranks}")

    @classmethod
    def open(
        cls,
        checkpoint: StoredWeights,
        layout: ParallelLayout,
        world: World | None = None,
        operators: Operators | None = None,
        limits: StepLimits | None = None,
        wiring: Wiring = Wiring.SHARDED,
    ) -> ModelSession:
        """Load every local rank's part of a checkpoint, or of shards. ``world`` defaults to all ranks here.

        ``wiring`` is what the ranks of a TP group share; it changes no bit of a result.

        Errors: :class:`v41_config.LayoutError` when the layout does not divide the model; the loader's errors.
        """
        world = world or LocalWorld(layout)
        ranks = [load_rank_model(checkpoint, layout, rank) for rank in world.local_ranks]
        return cls(ranks, world, operators, limits).rewired(wiring)

    def rewired(self, wiring: Wiring) -> ModelSession:
        """Another session over the same weights and world in that wiring, without caches."""
        ranks = [replace(model, wiring=wiring) for model in self._ranks.values()]
        return ModelSession(ranks, self.world, self.operators, self.limits)

    @property
    def layout(self) -> ParallelLayout:
        return self.world.layout

    @property
    def budget(self) -> CacheBudget | None:
        """The cache memory there is; None before the first :meth:`allocate`."""
        return None if self._memory is None else self._memory.budget

    @property
    def caches(self) -> Mapping[int, PagedCaches]:
        """The caches of each rank of this process; none before the first :meth:`allocate`."""
        return {} if self._memory is None else self._memory.caches

    def allocate(self, budget: CacheBudget | CapacityPlan) -> None:
        """Cache memory for every rank, dropping what there was. A poisoned session is usable again.

        A :class:`v41_config.CapacityPlan` means the blocks it counts for a card.

        Errors: :class:`SessionError` when the session is closed, or for a budget that the model has no use for; what
        there was is untouched then.
        """
        self._require_open("allocate")
        if isinstance(budget, CapacityPlan):
            if budget.config != self.config or budget.layout != self.layout:
                found = f"a plan for {budget.layout} of {'this' if budget.config == self.config else 'another'} model"
                raise SessionError("ModelSession.allocate", found, f"one for {self.layout} of this model")
            budget = CacheBudget.from_plan(budget)
        budget = budget.checked(self.config)
        self._memory = _Memory(
            budget,
            rope_tables(self.config, budget.max_tokens),
            {rank: PagedCaches.allocate(self.config, budget.blocks) for rank in self._ranks},
            [StoredTokens(self.config, budget.blocks.get(STATE_TABLE, 0)) for _ in range(self.layout.dp)],
        )
        self._failure = None

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
        group; by default slabs follow each group's own rows. Lengths count as stored only when all ranks succeeded.

        Errors: :class:`SessionError` when the session is poisoned or has no caches; :class:`RequestError` for a batch
        that exceeds :attr:`limits`, outgrows the budget's ``max_tokens`` or contradicts what is stored; what
        :meth:`StepBatch.lower` raises for one that does not fit; :class:`WorldError` from the ranks.
        """
        memory = self._ready(batches)
        lowered = []
        for dp_rank, batch in enumerate(batches):
            where = f"step batch, DP group {dp_rank}"
            lowered.append(
                batch.lower(self.config, self.layout, dp_rank, capacity=capacity, pool_blocks=memory.budget.blocks)
            )
            self.limits.check(where, batch)
            _check_lengths(where, lowered[-1][1].metadata, memory.budget.max_tokens)
            memory.stored[dp_rank].check(where, batch)

        def rank_program(communicator: Communicator) -> tuple[Tensor | None, dict[str, Tensor] | None]:
            token_ids, group = lowered[self.layout.dp_rank(communicator.rank)]
            recorder = Capture() if capture else None
            logits = self._ranks[communicator.rank].forward(
                communicator,
                token_ids,
                group,
                memory.caches[communicator.rank],
                memory.rope_tables,
                operators=self.operators.at(None),
                all_logits=all_logits,
                capture=recorder,
            )
            # equal on all ranks of the group: one of them tells
            told = logits if self.layout.tp_rank(communicator.rank) == 0 else None
            return told, None if recorder is None else recorder.tensors

        try:
            results = self.world.run(rank_program)
        except BaseException as error:
            self._failure = error
            raise
        outputs = []
        for dp_rank, (_, group) in enumerate(lowered):
            memory.stored[dp_rank].commit(batches[dp_rank])
            ranks = [results[rank] for rank in group.mapping.ranks]
            logits = ranks[0][0]
            assert logits is not None
            captures = tuple(Capture(tensors) for _, tensors in ranks if tensors is not None)
            outputs.append(GroupOutput(logits, all_logits, captures, group.metadata))
        return outputs

    def reset_request(self, dp_rank: int, state_block: int, stored: int = 0) -> None:
        """The request in a state block is over; the next one there starts at position ``stored``.

        ``stored`` above 0 is for a request whose caches somebody else has filled. No bytes are cleared: nothing reads
        those of an earlier request.

        Errors: :class:`SessionError` without caches, and for a group, block or length that there is not.
        """
        if self._memory is None:
            raise SessionError("ModelSession.reset_request", "no caches", "a call of allocate first")
        blocks = self._memory.stored[0].blocks
        for name, value, bound in (
            ("dp_rank", dp_rank, self.layout.dp),
            ("state_block", state_block, blocks),
            ("stored", stored, self._memory.budget.max_tokens + 1),
        ):
            number = as_integer(value)
            if number is None or not 0 <= number < bound:
                raise SessionError(f"ModelSession.reset_request {name}", value, f"0 <= {name} < {bound}")
        self._memory.stored[dp_rank].reset(state_block, stored)

    def stored_tokens(self, dp_rank: int, state_block: int) -> int:
        """Tokens that steps have stored of the request in a state block, since it was reset."""
        return 0 if self._memory is None else self._memory.stored[dp_rank].length(state_block)

    def close(self) -> None:
        """Release weights and caches; the session cannot be used again."""
        self._ranks.clear()
        self._memory = None

    def __enter__(self) -> ModelSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self, method: str) -> None:
        if not self._ranks:
            raise SessionError(f"ModelSession.{method}", "a closed session", "an open one")

    def _ready(self, batches: Sequence[StepBatch]) -> _Memory:
        self._require_open("step")
        if self._failure is not None:
            raise SessionError(
                "ModelSession.step", str(self._failure) or repr(self._failure), "a session in which no step has failed"
            )
        if self._memory is None:
            raise SessionError("ModelSession.step", "no caches", "a call of allocate first")
        if len(batches) != self.layout.dp:
            raise SessionError("ModelSession.step", f"{len(batches)} batches", f"one for each of dp={self.layout.dp}")
        return self._memory


@dataclass(frozen=True)
class _Memory:
    """What one allocation made: caches by rank, tables, and the stored lengths of each DP group."""

    budget: CacheBudget
    rope_tables: RopeTables
    caches: Mapping[int, PagedCaches]
    stored: Sequence[StoredTokens]


def _check_lengths(where: str, metadata: ForwardMetadata[Tensor], max_tokens: int) -> None:
    too_long = (metadata.new_kv_seq_lens > max_tokens).nonzero().flatten()
    if len(too_long):
        request = int(too_long[0])
        found = f"{int(metadata.new_kv_seq_lens[request])} tokens after the step"
        raise RequestError(f"{where}, request {request}", found, f"at most the {max_tokens} of the cache budget")
