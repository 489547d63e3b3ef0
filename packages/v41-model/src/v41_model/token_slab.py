"""The token mapping of one step: which packed rows of a DP group each of its TP ranks holds.

Rank ``r`` of a TP group holds the slab of rows ``[r * T_local, (r + 1) * T_local)`` with
``T_local = ceil(capacity / tp)``; of these the first ``active - r * T_local`` are tokens, the rest is padding: zero,
token id -1, mask false. Token ids, positions, masks, the residual and everything else that is per token go through
the same :class:`TokenMapping`, and their types say which side they are on: :class:`LocalRows` for a rank's own slab,
:class:`GatheredRows` for the whole group in packed order. Attention takes gathered rows, mHC and MoE take local ones;
rows of the other side, or of another step's mapping, are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from v41_config import ParallelLayout
from v41_model.errors import SlabError

__all__ = ["PADDING_ID", "GatheredRows", "LocalRows", "TokenMapping"]

PADDING_ID = -1
"""Token id and position of a row that holds no token."""


@dataclass(frozen=True)
class TokenMapping:
    """``active`` packed tokens of a step on the slabs of a TP group.

    ``capacity`` is the step's packed T unless the caller reserves more; slab sizes follow it, never ``active``.

    Errors: :class:`v41_config.LayoutError` unless ``0 <= active <= capacity``.
    """

    layout: ParallelLayout
    capacity: int
    active: int

    def __post_init__(self) -> None:
        self.layout.active_rows(self.capacity, self.active, 0)

    @property
    def slab_rows(self) -> int:
        """``T_local``, equal on all ranks of the group."""
        return self.layout.slab_rows(self.capacity)

    @property
    def padded_rows(self) -> int:
        """Rows of the group's slabs together, ``tp * T_local``."""
        return self.layout.tp * self.slab_rows

    def active_rows(self, rank: int) -> int:
        """Tokens on a rank; they are the first rows of its slab."""
        return self.layout.active_rows(self.capacity, self.active, rank)

    def shard(self, rows: Tensor, rank: int, fill: float = 0) -> LocalRows:
        """A rank's slab of packed rows ``[active, ...]``, padded with ``fill``; a copy, ``[T_local, ...]``."""
        if rows.shape[0] != self.active:
            raise SlabError("TokenMapping.shard", f"{rows.shape[0]} rows", f"{self.active} rows, one for each token")
        start = self.layout.slab_range(self.capacity, rank).start
        return self.pad(rows[start : start + self.active_rows(rank)], rank, fill)

    def pad(self, active_rows: Tensor, rank: int, fill: float = 0) -> LocalRows:
        """A rank's slab from the rows of its tokens alone, ``[active_rows(rank), ...]``; a copy."""
        if active_rows.shape[0] != self.active_rows(rank):
            found = f"{active_rows.shape[0]} rows"
            raise SlabError(f"slab of rank {rank}", found, f"{self.active_rows(rank)} rows, one for each token")
        slab = active_rows.new_full((self.slab_rows, *active_rows.shape[1:]), fill)
        slab[: active_rows.shape[0]] = active_rows
        return LocalRows(self, rank, slab)

    def mask(self, rank: int, device: torch.device | str = "cpu") -> LocalRows:
        """BOOL ``[T_local]``: which rows of a rank's slab hold a token."""
        return self.pad(torch.ones(self.active_rows(rank), dtype=torch.bool, device=device), rank, fill=False)

    def merge(self, shards: Sequence[LocalRows]) -> Tensor:
        """Put the slabs of the group's ranks, given in TP order, back together: packed rows ``[active, ...]``."""
        ranks = [s.rank for s in shards]
        if not ranks or ranks != list(self.layout.tp_group(ranks[0])) or any(s.mapping != self for s in shards):
            raise SlabError("TokenMapping.merge", f"slabs of ranks {ranks}", "the slabs of one TP group, in rank order")
        return torch.cat([s.tokens for s in shards])


@dataclass(frozen=True)
class LocalRows:
    """One rank's slab, ``tensor [T_local, ...]``."""

    mapping: TokenMapping
    rank: int
    tensor: Tensor

    def __post_init__(self) -> None:
        _require_rows("a slab", self.tensor, self.mapping.slab_rows)

    @property
    def tokens(self) -> Tensor:
        """The rows that hold tokens, ``[active_rows, ...]``: a view."""
        return self.tensor[: self.mapping.active_rows(self.rank)]

    def map_tokens(self, function: Callable[..., Tensor], *others: LocalRows) -> LocalRows:
        """Apply a row-wise ``function(tokens, *other tokens)`` and pad its result with zeros.

        Errors: :class:`SlabError` when the others are not slabs of the same rank and mapping.
        """
        for other in others:
            self.require_same_side(other)
        return self.mapping.pad(function(self.tokens, *(o.tokens for o in others)), self.rank)

    def require_same_side(self, other: object) -> None:
        """Raise :class:`SlabError` unless ``other`` is a slab of the same rank and mapping."""
        if not isinstance(other, LocalRows) or (other.mapping, other.rank) != (self.mapping, self.rank):
            raise SlabError(f"rows of rank {self.rank}'s slab", _side(other), f"rows of the same slab, {self.mapping}")


@dataclass(frozen=True)
class GatheredRows:
    """All slabs of the group in rank order, ``tensor [tp * T_local, ...]``: the packed order of the step."""

    mapping: TokenMapping
    tensor: Tensor

    def __post_init__(self) -> None:
        _require_rows("gathered slabs", self.tensor, self.mapping.padded_rows)

    @property
    def tokens(self) -> Tensor:
        """The rows that hold tokens, ``[T, ...]`` in packed order: a view."""
        return self.tensor[: self.mapping.active]

    def require_same_side(self, other: object) -> None:
        """Raise :class:`SlabError` unless ``other`` is gathered from the same mapping."""
        if not isinstance(other, GatheredRows) or other.mapping != self.mapping:
            raise SlabError("gathered rows", _side(other), f"rows gathered from the same slabs, {self.mapping}")


def _require_rows(where: str, tensor: Tensor, rows: int) -> None:
    if tensor.ndim < 1 or tensor.shape[0] != rows:
        raise SlabError(where, f"shape {list(tensor.shape)}", f"{rows} rows")


def _side(rows: object) -> str:
    if isinstance(rows, LocalRows):
        return f"rank {rows.rank}'s slab of {rows.mapping}"
    return f"gathered {rows.mapping}" if isinstance(rows, GatheredRows) else type(rows).__name__
