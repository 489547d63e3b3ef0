"""Block tables of the requests of one DP group, filled from free lists (model.md section 16).

A request takes a *row* when it is admitted and keeps it until it is dropped, whatever its place in a step's batch.
Window and compressed pages are lent as it grows and window pages come back as soon as they lie wholly behind the
window. The compressor state block of a request is a stable block of its own, one number for all sources.

A request may be admitted with a *claim*: blocks that are kept free for it, so that it can always grow to its claim
whatever the others take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from v41_config import BLOCK_ROWS, CachePool, ModelConfig, SourceTokens, cache_pools, compressed_table
from v41_model.cache_budget import CacheBudget
from v41_model.errors import PoolError

__all__ = ["BlockPool", "PageAllocator"]

Int32Array = npt.NDArray[np.int32]
NO_BLOCK = -1


class BlockPool:
    """The free list of one pool's physical blocks. Lower numbers are lent first, then the last returned."""

    def __init__(self, name: str, blocks: int) -> None:
        self.name = name
        self.blocks = blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._lent = np.zeros(blocks, dtype=bool)

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def require(self, count: int, purpose: str) -> None:
        """Raise :class:`PoolError` unless ``count`` blocks are free."""
        if count > len(self._free):
            found = f"{len(self._free)} of {self.blocks} blocks free"
            raise PoolError(f"pool {self.name}", found, f"{count} free blocks for {purpose}")

    def lend(self, count: int) -> Int32Array:
        """Take ``count`` blocks; the caller has called :meth:`require`."""
        taken = np.array([self._free.pop() for _ in range(count)], dtype=np.int32)
        self._lent[taken] = True
        return taken

    def is_lent(self, block: int) -> bool:
        """Whether somebody holds the block."""
        return 0 <= block < self.blocks and bool(self._lent[block])

    def take_back(self, blocks: Int32Array) -> None:
        """Return blocks that were lent. Errors: :class:`PoolError` for a block that is not out."""
        stray = [int(b) for b in blocks if not self.is_lent(int(b))]
        if stray or len(set(blocks.tolist())) != len(blocks):
            raise PoolError(
                f"pool {self.name}", f"return of blocks {blocks.tolist()}", "blocks that are lent, once each"
            )
        self._lent[blocks] = False
        self._free.extend(blocks.tolist())


@dataclass(frozen=True)
class _PagedTable:
    """The blocks of one block table and the table ``[max_requests, pages]`` they fill; ``kind`` is one of its pools.

    ``reached [max_requests]`` counts the pages a request ever had, those freed behind its window included, ``held``
    those it has now, ``claimed`` those it may come to hold whatever others do.
    """

    kind: CachePool
    pool: BlockPool
    table: Int32Array
    reached: npt.NDArray[np.int64]
    held: npt.NDArray[np.int64]
    claimed: npt.NDArray[np.int64]

    @property
    def unclaimed(self) -> int:
        """Free blocks that are kept for nobody."""
        return self.pool.free_blocks - int(np.maximum(self.claimed - self.held, 0).sum())

    def available(self, row: int) -> int:
        """Blocks that a request can get now."""
        return self.unclaimed + max(0, int(self.claimed[row] - self.held[row]))

    def tokens_in(self, pages: int) -> int:
        """The most tokens whose rows fit ``pages`` pages."""
        return pages * self.kind.block_tokens + self.kind.compress_ratio - 1

    def lend(self, row: int, pages: int) -> None:
        """Extend a request to ``pages`` pages, the caller having made sure that they are there."""
        new = slice(int(self.reached[row]), max(pages, int(self.reached[row])))
        self.table[row, new] = self.pool.lend(new.stop - new.start)
        self.held[row] += new.stop - new.start
        self.reached[row] = new.stop

    def take_back(self, row: int, pages: slice) -> None:
        """Return the blocks among a request's logical pages."""
        entries = self.table[row, pages]
        blocks = entries[entries != NO_BLOCK]
        self.pool.take_back(blocks)
        self.held[row] -= len(blocks)
        self.table[row, pages] = NO_BLOCK


class PageAllocator:
    """Pages of up to ``max_requests`` requests of at most ``max_tokens`` tokens, out of ``blocks`` per block table.

    ``blocks`` has an entry for every block table of :func:`v41_config.cache_pools`. Errors: :class:`SessionError`, as
    :meth:`CacheBudget.checked` raises it.
    """

    def __init__(self, config: ModelConfig, blocks: Mapping[str, int], max_requests: int, max_tokens: int) -> None:
        blocks = CacheBudget(blocks, max_tokens).checked(config).blocks
        self.config = config
        self.max_tokens = max_tokens
        self._tables: dict[str, _PagedTable] = {}
        for pool in cache_pools(config):
            name, pages = pool.block_table, pool.blocks_for(SourceTokens(max_tokens))
            if name not in self._tables:
                table = np.full((max_requests, pages), NO_BLOCK, dtype=np.int32)
                counts = (np.zeros(max_requests, dtype=np.int64) for _ in range(3))
                self._tables[name] = _PagedTable(pool, BlockPool(name, blocks[name]), table, *counts)
        self._rows = BlockPool("requests", max_requests)

    @property
    def free_blocks(self) -> dict[str, int]:
        """Free blocks per block table."""
        return {name: paged.pool.free_blocks for name, paged in self._tables.items()}

    def can_admit(self, claim: Mapping[str, int]) -> bool:
        """Whether there is a row, and as many unclaimed blocks per block table as ``claim`` says."""
        return self._rows.free_blocks > 0 and all(p.unclaimed >= claim.get(n, 0) for n, p in self._tables.items())

    def admit(self, claim: Mapping[str, int] | None = None) -> int:
        """A row for a new request, with its state block.

        ``claim`` says how many blocks per block table are kept for it (:func:`blocks_for_request`). Errors:
        :class:`PoolError` when there is no row or block, which changes nothing.
        """
        states = [paged for paged in self._tables.values() if not paged.kind.is_paged]
        self._rows.require(1, "a new request")
        for name, paged in self._tables.items():
            needed = max((claim or {}).get(name, 0), int(paged in states))
            if needed > paged.unclaimed:
                raise PoolError(f"pool {name}", *_shortage(paged.unclaimed, paged.pool, needed, "a new request"))
        row = int(self._rows.lend(1)[0])
        for name, paged in self._tables.items():
            paged.claimed[row] = (claim or {}).get(name, 0)
        for paged in states:
            paged.lend(row, 1)
        return row

    def room(self, row: int) -> int:
        """The tokens to which a request can grow now."""
        reach = (p.tokens_in(int(p.reached[row]) + p.available(row)) for p in self._tables.values() if p.kind.is_paged)
        return min(self.max_tokens, *reach)

    def grow(self, row: int, tokens: int) -> None:
        """Lend the pages that ``tokens`` tokens of a request need; all of them, or none and an error.

        Errors: :class:`PoolError` naming the pool, what is free and what is needed, or a row that is not admitted.
        """
        if not self._rows.is_lent(row):
            raise PoolError("PageAllocator.grow", f"request row {row}", "a row that was admitted and not dropped")
        if tokens > self.max_tokens:
            raise PoolError(f"request row {row}", f"{tokens} tokens", f"at most {self.max_tokens} tokens")
        for name, paged in self._tables.items():
            missing = paged.kind.blocks_for(SourceTokens(tokens)) - int(paged.reached[row])
            available = paged.available(row)
            if missing > available:
                purpose = f"request row {row} at {tokens} tokens"
                raise PoolError(f"pool {name}", *_shortage(available, paged.pool, missing, purpose))
        for paged in self._tables.values():
            paged.lend(row, paged.kind.blocks_for(SourceTokens(tokens)))

    def free_behind_window(self, row: int, tokens: int) -> None:
        """Take back window pages that no token after the first ``tokens`` of a request will read."""
        first_read = max(0, tokens - self.config.sliding_window + 1)
        self._tables["window"].take_back(row, slice(0, first_read // BLOCK_ROWS))

    def drop(self, row: int) -> None:
        """Return everything a request holds, its row and its claim included."""
        self._rows.take_back(np.array([row], dtype=np.int32))
        for paged in self._tables.values():
            paged.take_back(row, slice(None))
            paged.reached[row] = paged.claimed[row] = 0

    def window_block_table(self, rows: Sequence[int]) -> Int32Array:
        """``[B, pages]`` of the requests at ``rows``, in that order."""
        return self._tables["window"].table[list(rows)]

    def compressed_block_tables(self, rows: Sequence[int]) -> dict[int, Int32Array]:
        """Per compression ratio ``[B, pages]``."""
        ratios = {self.config.compress_ratios[layer] for layer in self.config.kv_source_layer_ids}
        return {ratio: self._tables[compressed_table(ratio)].table[list(rows)] for ratio in ratios}

    def state_block_tables(self, rows: Sequence[int]) -> dict[int, Int32Array]:
        """Per KV source with a compressor state ``[B, 1]``."""
        states = (paged for paged in self._tables.values() if not paged.kind.is_paged)
        return {layer: paged.table[list(rows)] for paged in states for layer in paged.kind.owner_layers}


def _shortage(available: int, pool: BlockPool, needed: int, purpose: str) -> tuple[str, str]:
    """What is found and what is expected of a pool that is full."""
    claimed = pool.free_blocks - available
    kept = f", {claimed} of them claimed by other requests" if claimed else ""
    return f"{pool.free_blocks} of {pool.blocks} blocks free{kept}", f"{needed} free blocks for {purpose}"
