"""The cache ABI against the published shapes and byte counts (model.md section 16)."""

from __future__ import annotations

import pytest

from v41_config import (
    BLOCK_ROWS,
    FLASH,
    FLASH6,
    STATE_CAPACITY,
    TINY,
    CachePool,
    ModelConfig,
    SourceTokens,
    blocks_for_tokens,
    cache_pools,
    tokens_per_block,
)


def pools_by_name(config: ModelConfig) -> dict[str, CachePool]:
    pools = {pool.name: pool for pool in cache_pools(config)}
    assert len(pools) == len(cache_pools(config))
    return pools


POOLS = pools_by_name(FLASH)

# name: (block table, owner layers, ratio, payload shape and dtype of 7 blocks, scale shape and dtype, group)
FLASH_POOLS = {
    "window": ("window", tuple(range(40)), 1, (7, 128, 1, 512), "float8_e4m3fn", (7, 128, 1, 16), "float8_e8m0fnu", 32),
    "c2a_cmp_kv": ("c2a_cmp_kv", (2, 8, 14), 2, (7, 128, 1, 256), "uint8", (7, 128, 1, 32), "float8_e4m3fn", 16),
    "c2a_index_key": ("c2a_cmp_kv", (2, 8, 14), 2, (7, 128, 1, 64), "uint8", (7, 128, 1, 4), "float8_e8m0fnu", 32),
    "c1a_cmp_kv": ("c1a_cmp_kv", (20,), 1, (7, 128, 1, 256), "uint8", (7, 128, 1, 32), "float8_e4m3fn", 16),
    "c1a_index_key": ("c1a_cmp_kv", (20,), 1, (7, 128, 1, 64), "uint8", (7, 128, 1, 4), "float8_e8m0fnu", 32),
}


def test_the_pools_there_are() -> None:
    assert set(POOLS) == {*FLASH_POOLS, "c2a_state"}
    assert {name: pool.owner_layers for name, pool in pools_by_name(TINY).items()} == {
        "window": tuple(range(10)),
        "c2a_cmp_kv": (2, 4),
        "c2a_index_key": (2, 4),
        "c2a_state": (2, 4),
        "c1a_cmp_kv": (6,),
        "c1a_index_key": (6,),
    }
    assert pools_by_name(FLASH6)["c2a_state"].owner_layers == (1,)


@pytest.mark.parametrize("name", FLASH_POOLS)
def test_shapes_and_dtypes(name: str) -> None:
    pool = POOLS[name]
    assert pool.scale is not None
    assert FLASH_POOLS[name] == (
        pool.block_table,
        pool.owner_layers,
        pool.compress_ratio,
        pool.payload.shape(7),
        pool.payload.dtype,
        pool.scale.shape(7),
        pool.scale.dtype,
        pool.group,
    )


def test_compressor_state() -> None:
    """Four tokens of 512 KV channels and 512 gate scores in FP32; ratio 1 has none."""
    state = POOLS["c2a_state"]
    assert (state.owner_layers, state.compress_ratio, state.scale) == ((2, 8, 14), 2, None)
    assert state.payload.shape(9) == (9, 4, 1024)
    assert state.payload.dtype == "float32"
    assert state.bytes_per_block == 4 * 1024 * 4
    assert STATE_CAPACITY == 4
    assert "c1a_state" not in POOLS


@pytest.mark.parametrize(
    ("name", "row_bytes"),
    [("window", 528), ("c2a_cmp_kv", 288), ("c1a_cmp_kv", 288), ("c2a_index_key", 68), ("c1a_index_key", 68)],
)
def test_bytes_of_a_row(name: str, row_bytes: int) -> None:
    assert POOLS[name].bytes_per_block == 128 * row_bytes


def test_global_footprint_is_the_published_890_bytes_per_token() -> None:
    per_token = sum(
        len(pool.owner_layers) * pool.bytes_per_block / tokens_per_block(pool.compress_ratio)
        for pool in POOLS.values()
        if pool.block_table.endswith("cmp_kv")
    )
    assert per_token == 890


def test_a_block_of_each_ratio_in_source_tokens() -> None:
    assert BLOCK_ROWS == 128
    assert tokens_per_block(1) == 128
    assert tokens_per_block(2) == 256


@pytest.mark.parametrize(
    ("tokens", "ratio", "blocks"),
    [
        (0, 1, 0),
        (1, 1, 1),
        (128, 1, 1),
        (129, 1, 2),
        (1, 2, 0),
        (2, 2, 1),
        (257, 2, 1),
        (258, 2, 2),
        (1048576, 2, 4096),
    ],
)
def test_blocks_for_tokens(tokens: int, ratio: int, blocks: int) -> None:
    assert blocks_for_tokens(SourceTokens(tokens), ratio) == blocks
