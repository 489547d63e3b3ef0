"""RoPE rows of one forward, gathered once for each distinct profile, positions and count (model.md section 7)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from v41_config import ModelConfig, RopeProfile
from v41_goldens.rope import materialize_rope_rows, precompute_rope_tables

RopeTables = dict[RopeProfile, tuple[Tensor, Tensor]]
"""Full cosine and sine tables per profile, FP32 `[capacity, rope_dim / 2]`, kept across forwards."""


def rope_tables(config: ModelConfig, capacity: int, device: torch.device | str = "cpu") -> RopeTables:
    """Both profiles' tables for positions below `capacity`."""
    profiles: tuple[RopeProfile, ...] = ("swa", "compressed")
    return {p: precompute_rope_tables(config, p, capacity, device=device) for p in profiles}


class RopeRows:
    """The rows of one forward. `gathers` counts how often a table was read; `materialize` replaces the golden that
    does it."""

    def __init__(self, tables: RopeTables, materialize: Callable[..., tuple[Tensor, Tensor]] | None = None) -> None:
        self._tables, self._materialize = tables, materialize
        self._rows: list[tuple[RopeProfile, Tensor, int, tuple[Tensor, Tensor]]] = []

    @property
    def gathers(self) -> int:
        return len(self._rows)

    def rows(self, profile: RopeProfile, position_ids: Tensor, count: int | None = None) -> tuple[Tensor, Tensor]:
        """Cosine and sine FP32 `[T, rope_dim / 2]` of INT32 `position_ids` `[T]`; negative is no rotation.

        `count` rows are active, all by default; what stands behind them is not looked at, and its rows are zero.

        Raises:
            PositionError: an active position beyond the tables, or a count that is not between 0 and T.
        """
        active = position_ids.shape[0] if count is None else count
        for known_profile, known_positions, known_count, rows in self._rows:
            if (known_profile, known_count) == (profile, active) and _equal_positions(
                known_positions, position_ids, active
            ):
                return rows
        materialize = self._materialize or materialize_rope_rows
        gathered = materialize(*self._tables[profile], position_ids, active)
        self._rows.append((profile, position_ids, active, gathered))
        return gathered


def _equal_positions(known: Tensor, positions: Tensor, active: int) -> bool:
    if known is positions:
        return True
    return known.shape == positions.shape and torch.equal(known[:active], positions[:active])
