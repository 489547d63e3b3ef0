"""The `device` layout: weights as public A5 readers take them (docs/layouts.md). Not yet confirmed on hardware."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from v41_config.model_config import MX_GROUP
from v41_loader.errors import LayoutGeometryError
from v41_loader.expected_tensors import ExpectedTensor
from v41_loader.layouts.fp4_tiles import FP4_TILE, TILE_ROW_BYTES, from_fp4_tiles, to_fp4_tiles
from v41_loader.layouts.fp8_input_major import from_input_major, to_input_major
from v41_loader.layouts.layout import Bytes, Transform
from v41_loader.layouts.mx_scale_order import SCALE_COLUMNS, SCALE_PAIR, from_mx_scale_order, to_mx_scale_order

_BLOCK_BYTES = 256 << 10
"""About the bytes of scales that are ordered at a time."""


@dataclass(frozen=True, slots=True)
class Fp8InputMajor:
    """FP8 codes `[N, K]` to `[K, N]`. One block: every row has a byte in every row of the result."""

    n: int
    k: int
    output_dtype = "F8_E4M3"

    @property
    def output_shape(self) -> tuple[int, ...]:
        return self.k, self.n

    @property
    def rows_per_block(self) -> int:
        return self.n

    def apply(self, block: Bytes) -> Bytes:
        """`[N, K]` to `[K, N]`."""
        return to_input_major(block)

    def inverse(self, block: Bytes) -> Bytes:
        """`[K, N]` to `[N, K]`."""
        return from_input_major(block.reshape(self.output_shape))


@dataclass(frozen=True, slots=True)
class Fp4Tiles:
    """Packed FP4 `[N, K/2]` to `[K, N/2]`, stored tile by tile: 256 rows make one N tile."""

    n: int
    k: int
    output_dtype = "I8"
    rows_per_block = FP4_TILE

    @property
    def output_shape(self) -> tuple[int, ...]:
        return self.k, self.n // 2

    def apply(self, block: Bytes) -> Bytes:
        """`[256 m, K/2]` to `[m, K, 128]`."""
        return to_fp4_tiles(block)

    def inverse(self, block: Bytes) -> Bytes:
        """`[m, K, 128]`, or these bytes in any shape, to `[256 m, K/2]`."""
        return from_fp4_tiles(block.reshape(-1, self.k, TILE_ROW_BYTES))


@dataclass(frozen=True, slots=True)
class MxScaleOrder:
    """E8M0 scales `[N / columns_per_row, K/32]` to `[K/32, N]`, stored in MX_B_NN order."""

    n: int
    k_groups: int
    columns_per_row: int
    output_dtype = "F8_E8M0"

    @property
    def output_shape(self) -> tuple[int, ...]:
        return self.k_groups, self.n

    @property
    def rows_per_block(self) -> int:
        rows_of_a_block = -(-SCALE_COLUMNS // self.columns_per_row)
        nbytes = rows_of_a_block * self.columns_per_row * self.k_groups
        return rows_of_a_block * max(1, _BLOCK_BYTES // nbytes)

    def apply(self, block: Bytes) -> Bytes:
        """`[rows, K/32]` to `[rows * columns_per_row / 16, K/64, 16, 2]`."""
        return to_mx_scale_order(block, self.columns_per_row)

    def inverse(self, block: Bytes) -> Bytes | None:
        """The released rows of these bytes; None where columns of one weight tile have different scales."""
        blocks = block.reshape(-1, self.k_groups // SCALE_PAIR, SCALE_COLUMNS, SCALE_PAIR)
        return from_mx_scale_order(blocks, self.columns_per_row)


# One object for the many tensors, experts most of them, that are alike.
_fp8_input_major = functools.lru_cache(maxsize=256)(Fp8InputMajor)
_fp4_tiles = functools.lru_cache(maxsize=256)(Fp4Tiles)
_mx_scale_order = functools.lru_cache(maxsize=256)(MxScaleOrder)


class DeviceLayout:
    """FP8 input-major, FP4 in tiles, scales expanded and ordered; all else as released."""

    name = "device"
    version = 1

    def transform(self, tensor: ExpectedTensor, part_shape: tuple[int, ...]) -> Transform | None:
        """The transform of a quantised weight or its scale, None for the rest.

        Raises:
            LayoutGeometryError: N or K is no multiple of what the layout's blocks hold.
        """
        if tensor.dtype not in ("F8_E4M3", "I8", "F8_E8M0"):
            return None
        n, k = (items * extent for items, extent in zip(part_shape, tensor.rule.item_extents, strict=True))
        match tensor.dtype:
            case "F8_E4M3":
                _require_multiples(tensor.name, n, k, MX_GROUP, MX_GROUP * SCALE_PAIR)
                return _fp8_input_major(n, k)
            case "I8":
                _require_multiples(tensor.name, n, k, FP4_TILE, FP4_TILE)
                return _fp4_tiles(n, k)
            case _:
                _require_multiples(tensor.name, n, k, SCALE_COLUMNS, MX_GROUP * SCALE_PAIR)
                return _mx_scale_order(n, k // MX_GROUP, tensor.rule.item_extents[0])


def _require_multiples(name: str, n: int, k: int, n_multiple: int, k_multiple: int) -> None:
    if n % n_multiple or k % k_multiple:
        expected = f"N a multiple of {n_multiple} and K of {k_multiple} for the device layout"
        raise LayoutGeometryError(name, f"N={n}, K={k}", expected)
