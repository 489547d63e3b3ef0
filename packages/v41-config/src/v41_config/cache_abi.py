"""The cache ABI: which pools there are, who owns them, and what one stored row is (model.md section 16).

Every paged pool is an array of physical blocks of 128 rows. A row of a compressed pool stands for `compress_ratio`
source tokens, so a block of ratio-2 rows covers 256 tokens and one of ratio-1 rows 128: `SourceTokens` and
`StoredRows` keep the two counts apart. Payloads stay quantised; the scales are a tensor of their own. How many blocks
a rank has is `CacheLayout`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NewType

from v41_config.config_bounds import INT32_MAX
from v41_config.model_config import FP4_CACHE_GROUP, MX_GROUP, ModelConfig

SourceTokens = NewType("SourceTokens", int)
"""A count of tokens of a request."""

StoredRows = NewType("StoredRows", int)
"""A count of rows in a cache pool."""

BLOCK_ROWS = StoredRows(128)
"""Rows of one physical cache block, the scheduler's page."""

MAX_BLOCK = INT32_MAX // BLOCK_ROWS
"""Largest physical block whose last row is still an INT32."""

STATE_CAPACITY = 4
"""Tokens a compressor state block remembers: a ring indexed by `position % STATE_CAPACITY`."""

STATE_TABLE = "c2a_state"
"""Block table of the compressor state: one block for a request, however long it is."""

DTYPE_BYTES = {"float8_e4m3fn": 1, "float8_e8m0fnu": 1, "uint8": 1, "float32": 4}


def compressed_table(compress_ratio: int) -> str:
    """Block table that compressed KV and index keys of one ratio share."""
    return f"c{compress_ratio}a_cmp_kv"


@dataclass(frozen=True)
class CacheTensor:
    """One tensor of a pool: `[blocks, *block_shape]` of `dtype`; FP4 is packed, two elements a `uint8`."""

    block_shape: tuple[int, ...]
    dtype: str

    def shape(self, blocks: int) -> tuple[int, ...]:
        return (blocks, *self.block_shape)

    @property
    def bytes_per_block(self) -> int:
        return prod(self.block_shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class CachePool:
    """One kind of cache. Each owner layer has tensors of its own; owners of one table share block numbers.

    `group` is the number of elements per scale (0: no scale); `compress_ratio` the source tokens per row. Sizes are
    those of one owner layer, payload and scale together.
    """

    name: str
    block_table: str
    owner_layers: tuple[int, ...]
    compress_ratio: int
    group: int
    payload: CacheTensor
    scale: CacheTensor | None

    @property
    def is_paged(self) -> bool:
        """Whether a request's rows are spread over pages; the compressor state is one block for its whole life."""
        return self.block_table != STATE_TABLE

    @property
    def block_rows(self) -> StoredRows:
        """Rows of one block: 128, or the state ring's capacity."""
        return StoredRows(self.payload.block_shape[0])

    @property
    def block_tokens(self) -> SourceTokens:
        """Source tokens of one block; a row of the state ring is one token."""
        return tokens_per_block(self.compress_ratio) if self.is_paged else SourceTokens(self.block_rows)

    @property
    def bytes_per_block(self) -> int:
        return self.payload.bytes_per_block + (self.scale.bytes_per_block if self.scale else 0)

    @property
    def bytes_per_row(self) -> int:
        return self.bytes_per_block // self.block_rows

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one more source token adds, exact; 0 for the compressor state, which does not grow."""
        return self.bytes_per_row / self.compress_ratio if self.is_paged else 0.0

    def blocks_for(self, tokens: SourceTokens) -> int:
        """Blocks that a request of `tokens` stored tokens has, none of them freed."""
        return blocks_for_tokens(tokens, self.compress_ratio) if self.is_paged else 1


def tokens_per_block(compress_ratio: int) -> SourceTokens:
    """Source tokens that one block of compressed rows stands for."""
    return SourceTokens(BLOCK_ROWS * compress_ratio)


def rows_for_tokens(tokens: SourceTokens, compress_ratio: int = 1) -> StoredRows:
    """Rows that `tokens` tokens publish; an open group publishes nothing."""
    return StoredRows(tokens // compress_ratio)


def blocks_for_tokens(tokens: SourceTokens, compress_ratio: int = 1) -> int:
    """Blocks that hold what `tokens` tokens publish."""
    return -(-rows_for_tokens(tokens, compress_ratio) // BLOCK_ROWS)


def blocks_spanned(rows: StoredRows) -> int:
    """The most blocks that `rows` consecutive rows can touch, wherever they start."""
    return -(-(rows - 1) // BLOCK_ROWS) + 1 if rows > 0 else 0


def _mx_rows(width: int) -> tuple[CacheTensor, CacheTensor]:
    return (
        CacheTensor((BLOCK_ROWS, 1, width), "float8_e4m3fn"),
        CacheTensor((BLOCK_ROWS, 1, width // MX_GROUP), "float8_e8m0fnu"),
    )


def _fp4_rows(width: int, group: int, scale_dtype: str) -> tuple[CacheTensor, CacheTensor]:
    return (
        CacheTensor((BLOCK_ROWS, 1, width // 2), "uint8"),
        CacheTensor((BLOCK_ROWS, 1, width // group), scale_dtype),
    )


def cache_pools(config: ModelConfig) -> tuple[CachePool, ...]:
    """Every pool of a model: window, then per ratio compressed KV and index keys, then the ratio-2 state ring."""
    window, window_scale = _mx_rows(config.head_dim)
    pools = [CachePool("window", "window", tuple(range(config.num_hidden_layers)), 1, MX_GROUP, window, window_scale)]
    for ratio in (2, 1):
        owners = tuple(i for i in config.kv_source_layer_ids if config.compress_ratios[i] == ratio)
        table = compressed_table(ratio)
        if not owners:
            continue
        compressed = _fp4_rows(config.head_dim, FP4_CACHE_GROUP, "float8_e4m3fn")
        index_key = _fp4_rows(config.index_head_dim, MX_GROUP, "float8_e8m0fnu")
        pools.append(CachePool(table, table, owners, ratio, FP4_CACHE_GROUP, *compressed))
        pools.append(CachePool(f"c{ratio}a_index_key", table, owners, ratio, MX_GROUP, *index_key))
        if ratio == 2:
            ring = CacheTensor((STATE_CAPACITY, 2 * config.head_dim), "float32")
            pools.append(CachePool(STATE_TABLE, STATE_TABLE, owners, ratio, 0, ring, None))
    return tuple(pools)
