"""The cache ABI: which pools there are, who owns them, and what one stored row is (model.md section 16).

Every pool is an array of physical blocks of 128 rows. A row of a compressed pool stands for `compress_ratio`
source tokens, so a block of ratio-2 rows covers 256 tokens and one of ratio-1 rows 128: `SourceTokens` and
`StoredRows` keep the two counts apart. Payloads stay quantised; the scales are a tensor of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NewType

from v41_config.model_config import FP4_CACHE_GROUP, MX_GROUP, ModelConfig

SourceTokens = NewType("SourceTokens", int)
"""A count of tokens of a request."""

StoredRows = NewType("StoredRows", int)
"""A count of rows in a cache pool."""

BLOCK_ROWS = StoredRows(128)
"""Rows of one physical cache block, the scheduler's page."""

STATE_CAPACITY = 4
"""Tokens a compressor state block remembers: a ring indexed by `position % STATE_CAPACITY`."""

DTYPE_BYTES = {"float8_e4m3fn": 1, "float8_e8m0fnu": 1, "uint8": 1, "float32": 4}


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

    `group` is the number of elements per scale (0: no scale); `compress_ratio` the source tokens per row.
    """

    name: str
    block_table: str
    owner_layers: tuple[int, ...]
    compress_ratio: int
    group: int
    payload: CacheTensor
    scale: CacheTensor | None

    @property
    def bytes_per_block(self) -> int:
        return self.payload.bytes_per_block + (self.scale.bytes_per_block if self.scale else 0)


def tokens_per_block(compress_ratio: int) -> SourceTokens:
    """Source tokens that one block of compressed rows stands for."""
    return SourceTokens(BLOCK_ROWS * compress_ratio)


def blocks_for_tokens(tokens: SourceTokens, compress_ratio: int = 1) -> int:
    """Blocks that hold what `tokens` tokens publish; an open group publishes nothing."""
    return -(-(tokens // compress_ratio) // BLOCK_ROWS)


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
        table = f"c{ratio}a_cmp_kv"
        if not owners:
            continue
        compressed = _fp4_rows(config.head_dim, FP4_CACHE_GROUP, "float8_e4m3fn")
        index_key = _fp4_rows(config.index_head_dim, MX_GROUP, "float8_e8m0fnu")
        pools.append(CachePool(table, table, owners, ratio, FP4_CACHE_GROUP, *compressed))
        pools.append(CachePool(f"c{ratio}a_index_key", table, owners, ratio, MX_GROUP, *index_key))
        if ratio == 2:
            ring = CacheTensor((STATE_CAPACITY, 2 * config.head_dim), "float32")
            pools.append(CachePool("c2a_state", "c2a_state", owners, ratio, 0, ring, None))
    return tuple(pools)
