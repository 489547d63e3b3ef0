"""Paged caches that hold the real packed bytes: publish by physical slot, read by physical row (model.md section 16).

A slot or row is `block * 128 + offset`; -1 publishes nothing and reads as zeros, so the bytes of free pages,
whatever they are, never reach a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from v41_config import CachePool, ModelConfig, cache_pools
from v41_goldens.errors import OperandError
from v41_goldens.quantisers import (
    Quantized,
    dequantize_compressed_kv,
    dequantize_index,
    dequantize_window_kv,
    quantize_compressed_kv,
    quantize_index,
    quantize_window_kv,
)


@dataclass(frozen=True)
class RowCache:
    """One layer's rows of one pool: payload `[blocks, 128, 1, bytes]` and scales `[blocks, 128, 1, groups]`."""

    payload: Tensor
    scale: Tensor
    decode: Callable[[Quantized], Tensor]

    def publish(self, slots: Tensor, rows: Quantized) -> None:
        """Write `rows` (`[n, ...]`) at `slots` INT64 `[n]`; slots of -1 write nothing.

        Raises:
            OperandError: a slot outside the pool, or rows of another dtype or width; nothing is written then.
        """
        for name, stored, new in (("payload", self.payload, rows.payload), ("scale", self.scale, rows.scale)):
            if new.dtype != stored.dtype or new.shape != (len(slots), stored.shape[-1]):
                raise OperandError(f"RowCache.publish rows.{name}", (new.dtype, tuple(new.shape)),
                                   f"{stored.dtype} [{len(slots)}, {stored.shape[-1]}]")  # fmt: skip
        if len(slots):
            self._check_capacity("RowCache.publish slots", int(slots.max()))
        live = slots >= 0
        where = slots[live]
        for stored, new in ((self.payload, rows.payload), (self.scale, rows.scale)):
            _flat_bytes(stored)[where] = _as_bytes(new)[live]

    def read(self, rows: Tensor) -> Tensor:
        """BF16 `[..., width]` of physical `rows` `[...]`; each distinct row is decoded once, -1 gives zeros.

        Raises:
            OperandError: a row outside the pool.
        """
        distinct, inverse = torch.unique(rows, return_inverse=True)
        if len(distinct):
            self._check_capacity("RowCache.read rows", int(distinct[-1]))
        live = distinct >= 0
        where = distinct[live].long()
        payload = _flat_bytes(self.payload)[where].view(self.payload.dtype)
        scale = _flat_bytes(self.scale)[where].view(self.scale.dtype)
        decoded = self.decode(Quantized(payload, scale))
        table = decoded.new_zeros(len(distinct), decoded.shape[-1])
        table[live] = decoded
        return table[inverse]

    def _check_capacity(self, where: str, highest: int) -> None:
        capacity = self.payload.shape[0] * self.payload.shape[1]
        if highest >= capacity:
            raise OperandError(where, highest, f"-1, or a row of the pool's {capacity}")


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _flat_bytes(stored: Tensor) -> Tensor:
    """A pool tensor as uint8 rows, sharing memory (float8 types lack indexed writes on some backends)."""
    raw = stored.view(torch.uint8)
    return raw.view(-1, raw.shape[-1])  # a view or an error: a copy would lose what is published


_DECODERS: dict[str, Callable[[Quantized], Tensor]] = {
    "window": dequantize_window_kv,
    "cmp_kv": dequantize_compressed_kv,
    "index_key": dequantize_index,
}


def publish_window_kv(cache: RowCache, slots: Tensor, kv: Tensor) -> None:
    """Quantise rotated window KV BF16 `[n, head_dim]` and write it at `slots`; see `RowCache.publish`."""
    cache.publish(slots, quantize_window_kv(kv))


def publish_compressed_kv(cache: RowCache, slots: Tensor, kv: Tensor) -> None:
    """The same for rotated latents BF16 `[n, head_dim]`."""
    cache.publish(slots, quantize_compressed_kv(kv))


def publish_index_key(cache: RowCache, slots: Tensor, keys: Tensor) -> None:
    """The same for index keys BF16 `[n, index_head_dim]`."""
    cache.publish(slots, quantize_index(keys))


@dataclass
class PagedCaches:
    """Every layer's caches of one rank: window rows, compressed KV, index keys and the FP32 compressor state."""

    window: dict[int, RowCache] = field(default_factory=dict)
    compressed: dict[int, RowCache] = field(default_factory=dict)
    index_key: dict[int, RowCache] = field(default_factory=dict)
    state: dict[int, Tensor] = field(default_factory=dict)

    @staticmethod
    def allocate(
        config: ModelConfig, blocks: Mapping[str, int], device: torch.device | str = "cpu", fill_byte: int = 0
    ) -> PagedCaches:
        """Caches with `blocks[table]` blocks per block table (`window`, `c2a_cmp_kv`, `c1a_cmp_kv`, `c2a_state`).

        `fill_byte=0xFF` poisons every payload, scale and state with NaN.
        """
        caches = PagedCaches()
        for pool in cache_pools(config):
            for layer in pool.owner_layers:
                payload = _filled(pool.payload.shape(blocks[pool.block_table]), pool.payload.dtype, device, fill_byte)
                if pool.scale is None:
                    caches.state[layer] = payload
                    continue
                scale = _filled(pool.scale.shape(blocks[pool.block_table]), pool.scale.dtype, device, fill_byte)
                caches._rows_of(pool)[layer] = RowCache(payload, scale, _DECODERS[_kind(pool)])
        return caches

    def _rows_of(self, pool: CachePool) -> dict[int, RowCache]:
        return {"window": self.window, "cmp_kv": self.compressed, "index_key": self.index_key}[_kind(pool)]


def _kind(pool: CachePool) -> str:
    """`c2a_index_key` -> `index_key`: the pool's name without its ratio."""
    return pool.name.partition("_")[2] or pool.name


def _filled(shape: tuple[int, ...], dtype: str, device: torch.device | str, fill_byte: int) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    raw = torch.full((*shape[:-1], shape[-1] * kind.itemsize), fill_byte, dtype=torch.uint8, device=device)
    return raw.view(kind)
