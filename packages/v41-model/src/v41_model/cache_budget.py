"""How much cache memory a session gets: blocks per block table, and the longest request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from v41_config import (
    BLOCK_ROWS,
    CacheLayout,
    CapacityPlan,
    ModelConfig,
    SourceTokens,
    StoredRows,
    blocks_spanned,
    cache_pools,
)
from v41_config.cache_abi import MAX_BLOCK
from v41_model.errors import SessionError
from v41_model.integer_checks import as_integer

__all__ = ["CacheBudget", "blocks_for_request"]


@dataclass(frozen=True)
class CacheBudget:
    """128-row blocks per block table (:func:`v41_config.cache_pools` names them) of each rank, and the tokens that the
    longest request may reach, which is the capacity of the RoPE tables."""

    blocks: Mapping[str, int]
    max_tokens: int

    @classmethod
    def from_plan(cls, plan: CapacityPlan) -> CacheBudget:
        """What a capacity plan gives a card: caches of ``plan.requests`` requests of ``plan.context`` tokens in each
        DP group, and the window pages under the rows of one prefill step."""
        held = CacheLayout.for_rank(
            plan.config,
            plan.layout,
            0,
            requests=plan.requests * plan.layout.dp,
            context=SourceTokens(plan.context),
            step_tokens=SourceTokens(plan.assumptions.decode_tokens),
        )
        prefill = plan.assumptions.prefill_tokens // BLOCK_ROWS
        return cls({**held.blocks, "window": held.blocks["window"] + prefill}, plan.context)

    @classmethod
    def for_groups(
        cls, config: ModelConfig, lengths: Sequence[Sequence[int]], at_once: int, step_rows: int
    ) -> CacheBudget:
        """Enough for any ``at_once`` requests of a DP group together; ``lengths`` are their final lengths in tokens,
        for each group.

        Window pages are counted for as long as they are held: under the window of each request, and under the
        ``step_rows`` rows that a step runs.
        """
        blocks = {pool.block_table: 1 for pool in cache_pools(config)}  # one without rows could not even be read
        for group in lengths:
            together = sorted(group, reverse=True)[:at_once]
            needs = [blocks_for_request(config, length) for length in together]
            pages = sum(-(-length // BLOCK_ROWS) for length in together)
            own = {table: sum(need[table] for need in needs) for table in blocks}
            own["window"] = min(pages, own["window"] + step_rows // BLOCK_ROWS + len(together))
            blocks = {table: max(count, own[table]) for table, count in blocks.items()}
        return cls(blocks, max((length for group in lengths for length in group), default=1))

    def checked(self, config: ModelConfig) -> CacheBudget:
        """The same in plain integers.

        Errors: :class:`SessionError` for a block table that is missing, unknown or without blocks, or a length that
        the model has not.
        """
        known = dict.fromkeys(pool.block_table for pool in cache_pools(config))
        if set(self.blocks) != set(known):
            raise SessionError("CacheBudget.blocks", sorted(self.blocks), f"a count for each of {', '.join(known)}")
        blocks = {}
        for table, given in self.blocks.items():
            count = as_integer(given)
            if count is None or not 1 <= count <= MAX_BLOCK:
                raise SessionError(f"CacheBudget.blocks[{table}]", given, f"an integer from 1 to {MAX_BLOCK}")
            blocks[table] = count
        longest, tokens = config.max_position_embeddings, as_integer(self.max_tokens)
        if tokens is None or not 1 <= tokens <= longest:
            expected = f"1 <= max_tokens <= max_position_embeddings = {longest}"
            raise SessionError("CacheBudget.max_tokens", self.max_tokens, expected)
        return CacheBudget(blocks, tokens)


def blocks_for_request(config: ModelConfig, tokens: int) -> dict[str, int]:
    """Blocks per block table that a request of ``tokens`` tokens holds at most while it runs a row a step.

    Window pages behind the window are given back, compressed pages stay. A step of more rows needs more window pages
    for as long as it takes.
    """
    kept = blocks_spanned(StoredRows(config.sliding_window))
    blocks = {}
    for pool in cache_pools(config):
        count = pool.blocks_for(SourceTokens(tokens))
        blocks[pool.block_table] = min(count, kept) if pool.block_table == "window" else count
    return blocks
