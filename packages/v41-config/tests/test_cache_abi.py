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
    StoredRows,
    blocks_for_tokens,
    blocks_spanned,
    cache_pools,
    rows_for_tokens,
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
    assert (state.block_rows, state.block_tokens, state.bytes_per_row, state.bytes_per_token) == (4, 4, 4096, 0)
    assert not state.is_paged
    assert all(pool.is_paged for pool in POOLS.values() if pool is not state)
    assert [state.blocks_for(SourceTokens(tokens)) for tokens in (0, 1, 1 << 20)] == [1, 1, 1]
    assert STATE_CAPACITY == 4
    assert "c1a_state" not in POOLS


@pytest.mark.parametrize(
    ("name", "row_bytes", "token_bytes", "block_tokens"),
    [
        ("window", 528, 528, 128),
        ("c2a_cmp_kv", 288, 144, 256),
        ("c1a_cmp_kv", 288, 288, 128),
        ("c2a_index_key", 68, 34, 256),
        ("c1a_index_key", 68, 68, 128),
    ],
)
def test_bytes_of_a_row_and_of_a_token(name: str, row_bytes: int, token_bytes: float, block_tokens: int) -> None:
    pool = POOLS[name]
    assert (pool.block_rows, pool.block_tokens) == (128, block_tokens)
    assert pool.bytes_per_block == 128 * row_bytes
    assert pool.bytes_per_row == row_bytes
    assert pool.bytes_per_token == token_bytes
    assert pool.blocks_for(SourceTokens(2 * block_tokens + pool.compress_ratio)) == 3


def test_half_bytes_per_token_are_exact() -> None:
    """32 index channels are 16 bytes and one scale, for two tokens."""
    narrow = TINY.model_copy(update={"index_head_dim": 32})
    assert pools_by_name(narrow)["c2a_index_key"].bytes_per_token == 8.5


def test_global_footprint_is_the_published_890_bytes_per_token() -> None:
    grows = [pool for pool in POOLS.values() if pool.name != "window"]
    assert sum(len(pool.owner_layers) * pool.bytes_per_token for pool in grows) == 890


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


def test_an_open_group_publishes_no_row() -> None:
    assert [rows_for_tokens(SourceTokens(tokens), 2) for tokens in range(5)] == [0, 0, 1, 1, 2]
    assert [rows_for_tokens(SourceTokens(tokens)) for tokens in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("rows", [0, 1, 2, 127, 128, 129, 130, 255, 256, 257, 258, 1000])
def test_blocks_spanned_is_the_worst_alignment(rows: int) -> None:
    touched = [len({row // 128 for row in range(start, start + rows)}) for start in range(128)]
    assert blocks_spanned(StoredRows(rows)) == max(touched)


def test_rows_and_tokens_are_different_types() -> None:
    """mypy refuses one for the other: strict mode reports an ignored error that does not arise."""
    blocks_for_tokens(BLOCK_ROWS)  # type: ignore[arg-type]
    blocks_spanned(tokens_per_block(2))  # type: ignore[arg-type]
