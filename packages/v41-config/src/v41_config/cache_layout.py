"""`CacheLayout`: how many blocks of each cache pool one rank holds, and what they weigh (model.md section 16)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from v41_config.cache_abi import (
    MAX_BLOCK,
    CachePool,
    SourceTokens,
    StoredRows,
    blocks_spanned,
    cache_pools,
)
from v41_config.errors import LayoutError
from v41_config.model_config import ModelConfig
from v41_config.parallel_layout import ParallelLayout


class AllocatedTensor(NamedTuple):
    """One tensor of a rank's caches: `layer_id`'s payload or scale of a pool, `shape` with its blocks."""

    pool: CachePool
    layer_id: int
    part: Literal["payload", "scale"]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class CacheLayout:
    """The cache memory of one rank.

    KV has a single head that every query head reads, so the ranks of a TP group hold the same caches
    (`replica_ranks`), and DP groups hold different ones: a block number means something inside one group only.
    `blocks` counts physical blocks per block table; owners of one table have equally many.
    """

    rank: int
    replica_ranks: range
    pools: tuple[CachePool, ...]
    blocks: Mapping[str, int] = field(hash=False)

    @classmethod
    def for_rank(
        cls,
        config: ModelConfig,
        layout: ParallelLayout,
        rank: int,
        *,
        requests: int,
        context: SourceTokens,
        step_tokens: SourceTokens,
    ) -> CacheLayout:
        """Blocks for `requests` requests of the whole deployment, dealt to DP groups by `layout.request_range`.

        Each may grow to `context` tokens, at most `step_tokens` of them in one step. Compressed pages stay for good;
        window pages are freed once no later token sees them, so a request holds the pages under
        `sliding_window - 1 + step_tokens` positions and no more.

        Raises:
            LayoutError: a rank outside the world, a count below 0, a context beyond `max_position_embeddings`, a step
                without tokens, or more blocks in a table than INT32 row numbers reach.
        """
        if not 0 <= context <= config.max_position_embeddings:
            raise LayoutError("context", context, f"0 to max_position_embeddings = {config.max_position_embeddings}")
        if step_tokens < 1:
            raise LayoutError("step_tokens", step_tokens, "at least 1 token")
        held = len(layout.request_range(requests, layout.dp_rank(rank)))
        kept = blocks_spanned(StoredRows(config.sliding_window - 1 + step_tokens))
        pools, blocks = cache_pools(config), dict[str, int]()
        for pool in pools:
            each = pool.blocks_for(context)
            blocks[pool.block_table] = held * (min(each, kept) if pool.block_table == "window" else each)
        for table, count in blocks.items():
            if count > MAX_BLOCK + 1:
                raise LayoutError(f"block table {table}", f"{count} blocks", f"at most {MAX_BLOCK + 1}: rows are INT32")
        return cls(rank, layout.tp_group(rank), pools, blocks)

    def tensors(self) -> Iterator[AllocatedTensor]:
        """Every tensor to allocate: pools in order, their owner layers in order, payload before scale."""
        for pool in self.pools:
            count = self.blocks[pool.block_table]
            for layer_id in pool.owner_layers:
                yield AllocatedTensor(pool, layer_id, "payload", pool.payload.shape(count), pool.payload.dtype)
                if pool.scale is not None:
                    yield AllocatedTensor(pool, layer_id, "scale", pool.scale.shape(count), pool.scale.dtype)

    @property
    def bytes_by_pool(self) -> dict[str, int]:
        """Bytes of each pool over all its owner layers."""
        return {p.name: len(p.owner_layers) * self.blocks[p.block_table] * p.bytes_per_block for p in self.pools}

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_pool.values())
