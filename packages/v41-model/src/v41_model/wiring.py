"""The two wirings of the TP group: which rows of the residual a rank holds, and what crosses the group for them.

``sharded``: each rank holds its slab. The normalised attention input is gathered, the FP32 output partials are
reduce-scattered; MoE takes the slab as it is.

``replicated``: every rank holds all rows, as before sequence parallelism. Attention takes them as they are, the output
partials are all-reduced; MoE still takes each row once, on the rank whose slab it is, and its output is gathered.

Partials are added in FP32 in rank order in both, and all else is row by row, so both give the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from v41_config import GatheredRows, LocalRows, ParallelLayout, TokenMapping
from v41_model.collective_log import Site
from v41_model.communicator import TokenCommunicator

__all__ = ["ReplicatedBoundary", "ShardedBoundary", "TpBoundary", "Wiring"]


@dataclass(frozen=True)
class TpBoundary(ABC):
    """The crossings between what rank ``rank`` of the world holds and what its TP group has together, in one step.

    ``mapping`` says which packed rows are whose slab. None of the crossings may be called for a group without tokens.
    """

    mapping: TokenMapping
    rank: int
    communicator: TokenCommunicator

    @abstractmethod
    def hold(self, rows: Tensor, fill: float = 0) -> LocalRows[Tensor]:
        """Of packed rows ``[T, ...]`` that every rank knows: those of this rank's residual. Nothing moves."""

    @abstractmethod
    def pad(self, tokens: Tensor) -> LocalRows[Tensor]:
        """Rows computed from the tokens of this rank's residual, with its padding. Nothing moves."""

    @abstractmethod
    def gather(self, rows: LocalRows[Tensor], site: Site) -> GatheredRows[Tensor]:
        """Rows of the residual -> the rows of the whole group, on every rank."""

    @abstractmethod
    def reduce(self, partial: Tensor, site: Site) -> LocalRows[Tensor]:
        """FP32 partials ``[T, D]`` of all packed rows -> their sum in rank order, FP32, for the residual's rows."""

    @abstractmethod
    def own(self, rows: LocalRows[Tensor]) -> LocalRows[Tensor]:
        """Of the residual's rows: this rank's slab, each token of the group on exactly one rank. Nothing moves."""

    @abstractmethod
    def rejoin(self, slab: LocalRows[Tensor], site: Site) -> LocalRows[Tensor]:
        """This rank's slab -> the residual's rows."""


class ShardedBoundary(TpBoundary):
    """The residual is the rank's slab."""

    def hold(self, rows: Tensor, fill: float = 0) -> LocalRows[Tensor]:
        return self.mapping.shard(rows, self.rank, fill)

    def pad(self, tokens: Tensor) -> LocalRows[Tensor]:
        return self.mapping.pad(tokens, self.rank)

    def gather(self, rows: LocalRows[Tensor], site: Site) -> GatheredRows[Tensor]:
        return GatheredRows(self.mapping, self.communicator.all_gather_tokens(rows.tensor, site))

    def reduce(self, partial: Tensor, site: Site) -> LocalRows[Tensor]:
        slabs = self.mapping.gathered(partial).tensor
        return LocalRows(self.mapping, self.rank, self.communicator.reduce_scatter_tokens(slabs, site))

    def own(self, rows: LocalRows[Tensor]) -> LocalRows[Tensor]:
        return rows

    def rejoin(self, slab: LocalRows[Tensor], site: Site) -> LocalRows[Tensor]:
        return slab


class ReplicatedBoundary(TpBoundary):
    """The residual is the slab of a group of one rank, which is this DP group."""

    @property
    def _residual(self) -> TokenMapping:
        alone = ParallelLayout(tp=1, dp=self.mapping.layout.dp)
        return TokenMapping(alone, self.mapping.dp_rank, self.mapping.capacity, self.mapping.active)

    def hold(self, rows: Tensor, fill: float = 0) -> LocalRows[Tensor]:
        return self._residual.shard(rows, self.mapping.dp_rank, fill)

    def pad(self, tokens: Tensor) -> LocalRows[Tensor]:
        return self._residual.pad(tokens, self.mapping.dp_rank)

    def gather(self, rows: LocalRows[Tensor], site: Site) -> GatheredRows[Tensor]:
        return self.mapping.gathered(rows.tokens)

    def reduce(self, partial: Tensor, site: Site) -> LocalRows[Tensor]:
        rows = self._residual.gathered(partial).tensor
        return LocalRows(self._residual, self.mapping.dp_rank, self.communicator.all_reduce(rows, site))

    def own(self, rows: LocalRows[Tensor]) -> LocalRows[Tensor]:
        return self.mapping.shard(rows.tokens, self.rank)

    def rejoin(self, slab: LocalRows[Tensor], site: Site) -> LocalRows[Tensor]:
        gathered = GatheredRows(self.mapping, self.communicator.all_gather_tokens(slab.tensor, site))
        return self.pad(gathered.tokens)


class Wiring(Enum):
    """See the module."""

    REPLICATED = "replicated"
    SHARDED = "sharded"

    def boundary(self, mapping: TokenMapping, rank: int, communicator: TokenCommunicator) -> TpBoundary:
        """The crossings of one step of one rank."""
        kind = ShardedBoundary if self is Wiring.SHARDED else ReplicatedBoundary
        return kind(mapping, rank, communicator)
