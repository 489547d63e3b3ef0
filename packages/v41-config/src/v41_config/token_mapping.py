"""Which packed rows of a DP group each of its TP ranks holds in one step, and rows that know which side they are on.

Rank `r` of a TP group holds the slab of rows `[r * T_local, (r + 1) * T_local)` with `T_local = ceil(capacity / tp)`;
its first `active - r * T_local` rows are tokens, the rest is padding: zero, ids and positions -1, mask false. Token
ids, masks, positions, the residual and the rows that MoE owns go through one `TokenMapping`. `LocalRows` are one
rank's slab, `GatheredRows` the group's slabs in rank order, which is the packed order: attention takes gathered rows,
hyper-connections and MoE local ones. With one rank, or an empty batch, both have equally many rows, so the side is a
type and never concluded from a count.

Rows may be NumPy arrays or tensors of any device; what is made from them is of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt

from v41_config.errors import LayoutError, SlabError
from v41_config.parallel_layout import ParallelLayout

RowsT = TypeVar("RowsT")

PADDING_ID = -1
"""Token id, position and request index of a row that holds no token."""


@dataclass(frozen=True)
class TokenMapping:
    """`active` packed tokens of DP group `dp_rank` on the slabs of its TP ranks.

    `capacity` is the step's packed T unless the caller reserves more; slab sizes follow it, never `active`. Ranks are
    ranks of the world; a rank of another group is refused.

    Raises:
        LayoutError: no such DP group, or not `0 <= active <= capacity`.
    """

    layout: ParallelLayout
    dp_rank: int
    capacity: int
    active: int

    def __post_init__(self) -> None:
        if not 0 <= self.dp_rank < self.layout.dp:
            raise LayoutError("dp_rank", self.dp_rank, f"0 <= dp_rank < dp = {self.layout.dp}")
        self.active_rows(self.ranks[0])

    @property
    def ranks(self) -> range:
        """The ranks that hold the group's slabs, in the order of the slabs."""
        return self.layout.tp_group(self.dp_rank * self.layout.tp)

    @property
    def slab_rows(self) -> int:
        """`T_local`, equal on all ranks of the group."""
        return self.layout.slab_rows(self.capacity)

    @property
    def padded_rows(self) -> int:
        """Rows of the group's slabs together, `tp * T_local`."""
        return self.layout.tp * self.slab_rows

    def active_rows(self, rank: int) -> int:
        """Tokens on a rank, `max(0, min(T_local, active - tp_rank * T_local))`: the first rows of its slab."""
        return self.layout.active_rows(self.capacity, self.active, self._member(rank))

    def token_range(self, rank: int) -> range:
        """Packed rows of the tokens that a rank holds; empty where its slab is padding alone."""
        start = min(self.layout.slab_range(self.capacity, self._member(rank)).start, self.active)
        return range(start, start + self.active_rows(rank))

    def owner_ranks(self) -> npt.NDArray[np.int32]:
        """INT32 `[active]`: the rank that routes each packed token to experts and gets its output back."""
        packed = np.arange(self.active, dtype=np.int32)
        owners: npt.NDArray[np.int32] = packed // max(1, self.slab_rows) + self.ranks.start
        return owners

    def shard(self, rows: RowsT, rank: int, fill: float = 0) -> LocalRows[RowsT]:
        """A rank's slab of packed rows `[active, ...]`, padded with `fill`; a copy, `[T_local, ...]`."""
        self._require_tokens("packed rows", rows, self.active)
        held = self.token_range(rank)
        return self.pad(_cut(rows, held.start, held.stop), rank, fill)

    def pad(self, active_rows: RowsT, rank: int, fill: float = 0) -> LocalRows[RowsT]:
        """A rank's slab from the rows of its tokens alone, `[active_rows(rank), ...]`; a copy, `[T_local, ...]`."""
        self._require_tokens(f"slab of rank {rank}", active_rows, self.active_rows(rank))
        return LocalRows(self, rank, _padded(active_rows, self.slab_rows, fill))

    def gathered(self, rows: RowsT, fill: float = 0) -> GatheredRows[RowsT]:
        """Packed rows `[active, ...]` with the group's padding behind them; a copy, `[tp * T_local, ...]`."""
        self._require_tokens("packed rows", rows, self.active)
        return GatheredRows(self, _padded(rows, self.padded_rows, fill))

    def mask(self, rank: int) -> LocalRows[npt.NDArray[np.bool_]]:
        """BOOL `[T_local]`: which rows of a rank's slab hold a token."""
        return self.pad(np.ones(self.active_rows(rank), dtype=np.bool_), rank, fill=False)

    def merge(self, slabs: Sequence[LocalRows[RowsT]]) -> RowsT:
        """Put the slabs of the group's ranks, given in rank order, back together: packed rows `[active, ...]`."""
        ranks = [slab.rank for slab in slabs]
        if ranks != list(self.ranks) or any(slab.mapping != self for slab in slabs):
            raise SlabError("TokenMapping.merge", f"slabs of ranks {ranks}", f"the slabs of {self.ranks}, in order")
        packed: Any = _padded(_cut(slabs[0].tensor, 0, 0), self.active, fill=0)
        for slab in slabs:
            held = self.token_range(slab.rank)
            packed[held.start : held.stop] = slab.tokens
        merged: RowsT = packed
        return merged

    def _member(self, rank: int) -> int:
        if rank not in self.ranks:
            raise LayoutError("rank", rank, f"a rank of DP group {self.dp_rank}, {self.ranks}")
        return rank

    @staticmethod
    def _require_tokens(where: str, rows: object, count: int) -> None:
        if _row_count(rows) != count:
            raise SlabError(where, _described(rows), f"{count} rows, one for each token")


@dataclass(frozen=True, eq=False)
class LocalRows(Generic[RowsT]):
    """One rank's slab, `tensor [T_local, ...]`."""

    mapping: TokenMapping
    rank: int
    tensor: RowsT

    def __post_init__(self) -> None:
        self.mapping.active_rows(self.rank)
        if _row_count(self.tensor) != self.mapping.slab_rows:
            raise SlabError(f"slab of rank {self.rank}", _described(self.tensor), f"{self.mapping.slab_rows} rows")

    @property
    def tokens(self) -> RowsT:
        """The rows that hold tokens, `[active_rows, ...]`: a view."""
        return _cut(self.tensor, 0, self.mapping.active_rows(self.rank))

    def map_tokens(self, function: Callable[..., RowsT], *others: LocalRows[Any]) -> LocalRows[RowsT]:
        """Apply a row-wise `function(tokens, *other tokens)` and pad its result with zeros.

        Raises:
            SlabError: the others are not slabs of the same rank and mapping.
        """
        for other in others:
            self.require_same_side(other)
        return self.mapping.pad(function(self.tokens, *(other.tokens for other in others)), self.rank)

    def require_same_side(self, other: object) -> None:
        """Raise `SlabError` unless `other` is a slab of the same rank and mapping."""
        if not isinstance(other, LocalRows) or (other.mapping, other.rank) != (self.mapping, self.rank):
            raise SlabError(f"rows of rank {self.rank}'s slab", _side(other), f"rows of the same slab, {self.mapping}")


@dataclass(frozen=True, eq=False)
class GatheredRows(Generic[RowsT]):
    """All slabs of the group in rank order, `tensor [tp * T_local, ...]`: the packed order of the step."""

    mapping: TokenMapping
    tensor: RowsT

    def __post_init__(self) -> None:
        if _row_count(self.tensor) != self.mapping.padded_rows:
            raise SlabError("gathered slabs", _described(self.tensor), f"{self.mapping.padded_rows} rows")

    @property
    def tokens(self) -> RowsT:
        """The rows that hold tokens, `[active, ...]` in packed order: a view."""
        return _cut(self.tensor, 0, self.mapping.active)

    def slab(self, rank: int) -> LocalRows[RowsT]:
        """One rank's part of the gathered rows, padding included: a view."""
        held = self.mapping.layout.slab_range(self.mapping.capacity, rank)
        return LocalRows(self.mapping, rank, _cut(self.tensor, held.start, held.stop))

    def require_same_side(self, other: object) -> None:
        """Raise `SlabError` unless `other` is gathered from the same mapping."""
        if not isinstance(other, GatheredRows) or other.mapping != self.mapping:
            raise SlabError("gathered rows", _side(other), f"rows gathered from the same slabs, {self.mapping}")


def _row_count(rows: Any) -> int | None:
    """Rows of an array, None where it has no first dimension."""
    return int(rows.shape[0]) if len(rows.shape) else None


def _cut(rows: RowsT, start: int, stop: int) -> RowsT:
    part: RowsT = cast(Any, rows)[start:stop]
    return part


def _padded(rows: Any, count: int, fill: float) -> Any:
    """A copy of `rows` with rows of `fill` behind it, `[count, ...]`, of the same kind, dtype and device."""
    shape = (count, *rows.shape[1:])
    padded = np.empty(shape, rows.dtype) if isinstance(rows, np.ndarray) else rows.new_empty(shape)
    padded[: rows.shape[0]] = rows
    padded[rows.shape[0] :] = fill
    return padded


def _described(rows: Any) -> str:
    return f"shape {list(rows.shape)}"


def _side(rows: object) -> str:
    if isinstance(rows, LocalRows):
        return f"rank {rows.rank}'s slab of {rows.mapping}"
    return f"gathered {rows.mapping}" if isinstance(rows, GatheredRows) else type(rows).__name__
