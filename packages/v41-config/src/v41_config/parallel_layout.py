"""How ranks share the model: TP attention groups, DP request groups, EP experts over all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from v41_config.errors import LayoutError
from v41_config.model_config import ModelConfig

MAX_RANKS = 4096
"""Ranks of a world: a bound on what a wrong number can make anybody allocate, far above any model's experts."""


@dataclass(frozen=True)
class ParallelLayout:
    """`tp` ranks share one attention group, `dp` groups share the requests, all `ep = tp * dp` share the experts.

    TP groups are contiguous: `tp_rank = rank % tp`, `dp_rank = rank // tp`, `ep_rank = rank`.

    Raises:
        LayoutError: a size below 1, more than `MAX_RANKS` ranks, or a rank outside the world.
    """

    tp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for name, size in (("tp", self.tp), ("dp", self.dp)):
            if type(size) is not int or size < 1:
                raise LayoutError(name, size, "a size of at least 1")
        if self.world_size > MAX_RANKS:
            raise LayoutError("tp * dp", self.world_size, f"at most {MAX_RANKS} ranks")

    @property
    def ep(self) -> int:
        """Ranks that share the routed experts."""
        return self.tp * self.dp

    @property
    def world_size(self) -> int:
        return self.tp * self.dp

    def tp_rank(self, rank: int) -> int:
        return self._checked(rank) % self.tp

    def dp_rank(self, rank: int) -> int:
        return self._checked(rank) // self.tp

    def ep_rank(self, rank: int) -> int:
        return self._checked(rank)

    def tp_group(self, rank: int) -> range:
        """The ranks that share `rank`'s requests, in TP order."""
        base = self.dp_rank(rank) * self.tp
        return range(base, base + self.tp)

    def check(self, config: ModelConfig) -> None:
        """Raise `LayoutError` where a size does not divide what it shares out."""
        for ranks, parts, name, size in (
            ("tp", self.tp, "num_attention_heads", config.num_attention_heads),
            ("tp", self.tp, "o_groups", config.o_groups),
            ("tp", self.tp, "vocab_size", config.vocab_size),
            ("ep", self.ep, "n_routed_experts", config.n_routed_experts),
        ):
            if size % parts:
                raise LayoutError("ep = tp * dp" if ranks == "ep" else ranks, parts, f"a divisor of {name} = {size}")

    def head_range(self, config: ModelConfig, rank: int) -> range:
        """Query heads (and attention sinks) of a rank."""
        return self._tp_share(config, config.num_attention_heads, rank)

    def output_group_range(self, config: ModelConfig, rank: int) -> range:
        """Output groups of a rank; they read exactly the heads of `head_range`."""
        return self._tp_share(config, config.o_groups, rank)

    def vocab_range(self, config: ModelConfig, rank: int) -> range:
        """Token ids whose embedding and head rows a rank holds."""
        return self._tp_share(config, config.vocab_size, rank)

    def expert_range(self, config: ModelConfig, rank: int) -> range:
        """Routed experts of a rank."""
        self.check(config)
        return _share(config.n_routed_experts, self.ep, self.ep_rank(rank))

    def expert_owner(self, config: ModelConfig, expert_id: int) -> int:
        """The rank that holds an expert."""
        self.check(config)
        if not 0 <= expert_id < config.n_routed_experts:
            raise LayoutError("expert_id", expert_id, f"0 <= expert_id < {config.n_routed_experts}")
        return expert_id // (config.n_routed_experts // self.ep)

    def request_range(self, requests: int, dp_rank: int) -> range:
        """Requests of a DP group: runs of neighbours, sizes as equal as possible, the larger ones first."""
        if not 0 <= dp_rank < self.dp:
            raise LayoutError("dp_rank", dp_rank, f"0 <= dp_rank < dp = {self.dp}")
        return range(*self.dp_group_start_loc(requests)[dp_rank : dp_rank + 2])

    def dp_group_start_loc(self, requests: int) -> tuple[int, ...]:
        """The first request of each DP group's `request_range`, then `requests`."""
        if requests < 0:
            raise LayoutError("requests", requests, "at least 0")
        each, larger = divmod(requests, self.dp)
        return tuple(group * each + min(group, larger) for group in range(self.dp + 1))

    def slab_rows(self, capacity: int) -> int:
        """`T_local`: rows of every rank's token slab, `ceil(capacity / tp)`, whatever the active count."""
        if capacity < 0:
            raise LayoutError("capacity", capacity, "at least 0 rows")
        return -(-capacity // self.tp)

    def slab_range(self, capacity: int, rank: int) -> range:
        """Rows of the group's packed batch that a rank's slab stands for; it may reach past `capacity`."""
        rows = self.slab_rows(capacity)
        return _share(rows * self.tp, self.tp, self.tp_rank(rank))

    def active_rows(self, capacity: int, active: int, rank: int) -> int:
        """Valid rows of a rank's slab, `max(0, min(T_local, active - tp_rank * T_local))`; the rest is padding."""
        if not 0 <= active <= capacity:
            raise LayoutError("active", active, f"0 <= active <= capacity = {capacity}")
        rows = self.slab_rows(capacity)
        return max(0, min(rows, active - self.tp_rank(rank) * rows))

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise LayoutError("rank", rank, f"0 <= rank < world_size = {self.world_size}")
        return rank

    def _tp_share(self, config: ModelConfig, size: int, rank: int) -> range:
        self.check(config)
        return _share(size, self.tp, self.tp_rank(rank))


def _share(size: int, parts: int, part: int) -> range:
    each = size // parts
    return range(part * each, (part + 1) * each)
