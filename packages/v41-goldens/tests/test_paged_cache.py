"""Paged caches: real bytes in shuffled pages, and free memory that never reaches a result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from v41_config import BLOCK_ROWS, TINY, cache_pools
from v41_goldens import PagedCaches
from v41_goldens.errors import OperandError
from v41_goldens.judges import assert_equal_bits, unequal_bits
from v41_goldens.paged_cache import RowCache
from v41_goldens.quantisers import (
    Quantized,
    dequantize_compressed_kv,
    dequantize_index,
    dequantize_window_kv,
    quantize_compressed_kv,
    quantize_index,
    quantize_window_kv,
)

BLOCKS = {"window": 4, "c2a_cmp_kv": 4, "c1a_cmp_kv": 4, "c2a_state": 3}
CAPACITY = 4 * BLOCK_ROWS
POISON = 0xFF

Pool = tuple[Callable[[PagedCaches], RowCache], Callable[[Tensor], Quantized], Callable[[Quantized], Tensor]]
POOLS: dict[str, Pool] = {
    "window": (lambda caches: caches.window[3], quantize_window_kv, dequantize_window_kv),
    "compressed": (lambda caches: caches.compressed[6], quantize_compressed_kv, dequantize_compressed_kv),
    "index_key": (lambda caches: caches.index_key[2], quantize_index, dequantize_index),
}


@pytest.fixture(params=POOLS)
def pool(request: pytest.FixtureRequest) -> Pool:
    return POOLS[request.param]


def poisoned() -> PagedCaches:
    return PagedCaches.allocate(TINY, BLOCKS, fill_byte=POISON)


def some_rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


def raw_bytes(cache: RowCache) -> tuple[Tensor, Tensor]:
    """Payload and scale bytes `[capacity, bytes]`, copied."""
    payload, scale = (t.view(torch.uint8).reshape(CAPACITY, -1).clone() for t in (cache.payload, cache.scale))
    return payload, scale


def every_tensor(caches: PagedCaches) -> dict[str, Tensor]:
    """The bytes of everything in the caches."""
    found = {f"state.{layer}": state for layer, state in caches.state.items()}
    for kind in ("window", "compressed", "index_key"):
        for layer, cache in getattr(caches, kind).items():
            found[f"{kind}.{layer}.payload"], found[f"{kind}.{layer}.scale"] = cache.payload, cache.scale
    return {name: tensor.view(torch.uint8).clone() for name, tensor in found.items()}


def test_what_is_published_is_read_back(pool: Pool) -> None:
    of, quantize, dequantize = pool
    cache, rows = of(poisoned()), quantize(some_rows(5))
    slots = torch.tensor([CAPACITY - 1, 0, 127, 128, 300])
    cache.publish(slots, rows)
    assert_equal_bits(cache.read(slots), dequantize(rows), "rows")
    order = torch.tensor([[300, 0, 300], [128, CAPACITY - 1, 0]])
    positions = torch.tensor([[4, 1, 4], [3, 0, 1]])
    assert_equal_bits(cache.read(order.int()), dequantize(rows)[positions], "repeated rows, any order, INT32")


def test_only_the_named_rows_change(pool: Pool) -> None:
    of, quantize, _ = pool
    caches = poisoned()
    cache = of(caches)
    before, everything = raw_bytes(cache), every_tensor(caches)
    slots = torch.tensor([-1, 200, -1, 511])
    rows = quantize(some_rows(4))
    cache.publish(slots, rows)
    for was, now, new in zip(before, raw_bytes(cache), (rows.payload, rows.scale), strict=True):
        expected = was.clone()
        expected[[200, 511]] = new.contiguous().view(torch.uint8)[[1, 3]]
        assert_equal_bits(now, expected, "bytes")
    changed = [name for name, old in everything.items() if not torch.equal(old, every_tensor(caches)[name])]
    assert len(changed) == 2
    assert {name.rsplit(".", 1)[1] for name in changed} == {"payload", "scale"}


def test_minus_one_writes_nothing_and_reads_zero(pool: Pool) -> None:
    of, quantize, _ = pool
    cache = of(poisoned())
    before = raw_bytes(cache)
    cache.publish(torch.full((3,), -1), quantize(some_rows(3)))
    for was, now in zip(before, raw_bytes(cache), strict=True):
        assert_equal_bits(now, was, "bytes")
    assert_equal_bits(cache.read(torch.full((2, 3), -1)), torch.zeros(2, 3, 64).bfloat16(), "nothing")


def test_free_rows_are_poison_that_only_their_readers_see(pool: Pool) -> None:
    """Reading a free row gives NaN: a wrong index shows. Reading around it does not touch it."""
    of, quantize, dequantize = pool
    cache, rows = of(poisoned()), quantize(some_rows(2))
    cache.publish(torch.tensor([10, 12]), rows)
    assert cache.read(torch.tensor([11])).isnan().all()
    read = cache.read(torch.tensor([12, -1, 10, -1]))
    assert_equal_bits(read[[0, 2]], dequantize(rows)[[1, 0]], "live rows")
    assert_equal_bits(read[[1, 3]], torch.zeros(2, 64).bfloat16(), "rows of -1")
    assert cache.read(torch.tensor([10, 11, 12])).isnan().any(dim=-1).tolist() == [False, True, False]


def test_poison_is_nan_everywhere() -> None:
    caches = poisoned()
    assert caches.window[0].scale.float().isnan().all()
    assert caches.window[0].payload.float().isnan().all()
    assert caches.compressed[2].scale.float().isnan().all()
    assert caches.index_key[2].scale.float().isnan().all()
    assert caches.state[2].isnan().all()


def test_shapes_and_owners_are_those_of_the_abi() -> None:
    caches = PagedCaches.allocate(TINY, BLOCKS)
    found = {"window": caches.window, "cmp_kv": caches.compressed, "index_key": caches.index_key}
    owners: dict[str, set[int]] = {kind: set() for kind in found}
    for pool in cache_pools(TINY):
        blocks = BLOCKS[pool.block_table]
        for layer in pool.owner_layers:
            if pool.scale is None:
                assert caches.state[layer].shape == pool.payload.shape(blocks)
                continue
            kind = pool.name if pool.name == "window" else pool.name.split("_", 1)[1]
            owners[kind].add(layer)
            for tensor, abi in ((found[kind][layer].payload, pool.payload), (found[kind][layer].scale, pool.scale)):
                assert tensor.shape == abi.shape(blocks)
                assert tensor.dtype == getattr(torch, abi.dtype)
                assert not tensor.view(torch.uint8).any()
    assert {kind: set(layers) for kind, layers in found.items()} == owners


def test_empty_pools_and_empty_rows(pool: Pool) -> None:
    of, quantize, _ = pool
    cache = of(PagedCaches.allocate(TINY, dict.fromkeys(BLOCKS, 0)))
    cache.publish(torch.empty(0, dtype=torch.int64), quantize(some_rows(0)))
    cache.publish(torch.tensor([-1]), quantize(some_rows(1)))
    assert cache.read(torch.empty(0, 7, dtype=torch.int64)).shape == (0, 7, 64)
    assert_equal_bits(cache.read(torch.full((2,), -1)), torch.zeros(2, 64).bfloat16(), "nothing")
    with pytest.raises(OperandError, match="pool's 0"):
        cache.publish(torch.tensor([0]), quantize(some_rows(1)))


@pytest.mark.parametrize("slot", [CAPACITY, CAPACITY + 1, 2**31 - 1, 2**40])
def test_rows_beyond_the_pool_are_refused_before_any_write(pool: Pool, slot: int) -> None:
    of, quantize, _ = pool
    cache = of(poisoned())
    before = raw_bytes(cache)
    with pytest.raises(OperandError, match=f"slots: expected -1, or a row of the pool's {CAPACITY}, found {slot}"):
        cache.publish(torch.tensor([0, slot, 1]), quantize(some_rows(3)))
    with pytest.raises(OperandError, match="rows: expected -1"):
        cache.read(torch.tensor([[0, slot]]))
    for was, now in zip(before, raw_bytes(cache), strict=True):
        assert_equal_bits(now, was, "bytes")


def test_rows_of_another_format_are_refused_before_any_write() -> None:
    cache = poisoned().window[0]
    before = raw_bytes(cache)
    good = quantize_window_kv(some_rows(2))
    for bad, name in (
        (Quantized(good.payload.view(torch.uint8), good.scale), "payload"),
        (Quantized(good.payload[:1], good.scale), "payload"),
        (Quantized(good.payload, good.scale[:, :1]), "scale"),
        (Quantized(good.payload, good.scale.view(torch.uint8)), "scale"),
    ):
        with pytest.raises(OperandError, match=f"rows.{name}"):
            cache.publish(torch.tensor([0, 1]), bad)
    for was, now in zip(before, raw_bytes(cache), strict=True):
        assert_equal_bits(now, was, "bytes")


def test_a_pool_that_cannot_be_viewed_as_rows_is_not_copied_silently() -> None:
    """Publishing into a copy would lose the rows."""
    whole = PagedCaches.allocate(TINY, BLOCKS).window[0]
    strided = RowCache(whole.payload[:, :100], whole.scale[:, :100], dequantize_window_kv)
    with pytest.raises(RuntimeError, match="view"):
        strided.publish(torch.tensor([0]), quantize_window_kv(some_rows(1)))


def test_a_row_in_the_wrong_page_is_seen(pool: Pool) -> None:
    """One block further, or the scale of the neighbour: the judge of these tests notices."""
    of, quantize, dequantize = pool
    cache, rows = of(poisoned()), quantize(some_rows(300, seed=5) * torch.arange(1, 301).unsqueeze(1))
    cache.publish(torch.arange(300), rows)
    expected = dequantize(rows)[:128]
    assert not unequal_bits(cache.read(torch.arange(128)), expected).any()
    assert unequal_bits(cache.read(torch.arange(128) + BLOCK_ROWS), expected).any(dim=-1).all()
    misplaced = RowCache(cache.payload, cache.scale.roll(1, dims=1), cache.decode)
    assert unequal_bits(misplaced.read(torch.arange(1, 128)), expected[1:]).any()
