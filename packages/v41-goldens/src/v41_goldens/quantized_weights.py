"""Quantised matrices, packed as they lie in a checkpoint, and how their rows are decoded (model.md section 2.8)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from v41_config.model_config import MX_GROUP
from v41_goldens.errors import WeightError
from v41_goldens.exact import dot_by_rows
from v41_goldens.number_formats import E4M3_UNIT_IN_FP16, e2m1_rows, e4m3_decode, e4m3_in_fp16, e8m0_decode
from v41_goldens.scratch import MatrixMaker, new_matrix, scratch_matrix

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on

RowDecoder = Callable[[int, int], Tensor]
"""Gives rows `start:stop` of a weight, dequantised; they may be the thread's scratch, to be used at once."""


@dataclass(frozen=True, eq=False)
class Fp8Weight:
    """E4M3 codes with one E8M0 scale per 32x32 tile (model.md section 2.8).

    Attributes:
        codes: float8_e4m3fn `[N, K]`, N and K multiples of 32.
        scale: float8_e8m0fnu `[N/32, K/32]`.
    """

    codes: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        expect_tensor(self.codes, torch.float8_e4m3fn, None, "Fp8Weight codes")
        n, k = _matrix_shape(self.codes, "Fp8Weight codes")
        if n % MX_GROUP or k % MX_GROUP:
            raise WeightError("Fp8Weight codes", (n, k), f"multiples of {MX_GROUP}")
        expect_tensor(self.scale, torch.float8_e8m0fnu, (n // MX_GROUP, k // MX_GROUP), "Fp8Weight scale")

    @property
    def shape(self) -> tuple[int, int]:
        """`(N, K)`."""
        return _matrix_shape(self.codes, "Fp8Weight codes")

    def rows(self, start: int, stop: int) -> Self:
        """Rows `start:stop` as a view; both must be multiples of 32."""
        _check_tile_range("Fp8Weight rows", start, stop)
        scale = self.scale[start // MX_GROUP : stop // MX_GROUP]
        return dataclasses.replace(self, codes=self.codes[start:stop], scale=scale)

    def columns(self, start: int, stop: int) -> Self:
        """Columns `start:stop` as a view; both must be multiples of 32."""
        _check_tile_range("Fp8Weight columns", start, stop)
        scale = self.scale[:, start // MX_GROUP : stop // MX_GROUP]
        return dataclasses.replace(self, codes=self.codes[:, start:stop], scale=scale)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """`[N, K]`: code times scale, exact as far as the range of `dtype`, FP32 or BF16, goes.

        A product beyond it becomes infinite; BF16 loses bits below 2^-126.
        """
        return self.decoder(dtype, new_matrix)(0, self.shape[0])

    def decoder(self, dtype: torch.dtype = torch.float32, matrix: MatrixMaker = scratch_matrix) -> RowDecoder:
        """`dequantize` for callers that take rows `start:stop`, multiples of 32, one after the other.

        Rows that a caller keeps want another `matrix` than the default, `new_matrix`.
        """
        scale = e8m0_decode(self.scale)
        factor = scale * E4M3_UNIT_IN_FP16
        fp16_suffices = not factor.isinf().any()

        def rows(start: int, stop: int) -> Tensor:
            _check_tile_range("Fp8Weight decoder", start, stop)
            own = self.codes[start:stop].contiguous()
            if len(own) != stop - start:  # as a slice it would be cut short in silence
                raise WeightError("Fp8Weight decoder", (start, stop), f"rows of {self.shape[0]}")
            values, factors = e4m3_in_fp16(own) if fp16_suffices else None, factor
            if values is None:
                values, factors = e4m3_decode(own), scale
            of_columns = factors[start // MX_GROUP : stop // MX_GROUP].repeat_interleave(MX_GROUP, dim=1)
            count, k = own.shape
            in_fp32 = matrix if dtype == torch.float32 else scratch_matrix
            result = in_fp32(count, k, torch.float32, own.device).copy_(values)
            result.unflatten(0, (-1, MX_GROUP)).mul_(of_columns.unsqueeze(1))
            return result if dtype == torch.float32 else matrix(count, k, dtype, own.device).copy_(result)

        return rows

    def dot(self, x: Tensor) -> Tensor:
        """Dot products `[..., N]` of rows `x [..., K]` with this matrix: FP32, by E1."""
        return dot_by_rows(x, self.shape[0], self.decoder())


@dataclass(frozen=True, eq=False)
class Fp4Weight:
    """Packed E2M1 codes with one E8M0 scale per 32 inputs (model.md section 2.8).

    Attributes:
        packed: int8 `[N, K/2]`, even input in the low nibble, K a multiple of 32.
        scale: float8_e8m0fnu `[N, K/32]`.
    """

    packed: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        expect_tensor(self.packed, torch.int8, None, "Fp4Weight packed")
        n, half = _matrix_shape(self.packed, "Fp4Weight packed")
        if half * 2 % MX_GROUP:
            raise WeightError("Fp4Weight packed", (n, half), f"K a multiple of {MX_GROUP}, so {MX_GROUP // 2} bytes")
        expect_tensor(self.scale, torch.float8_e8m0fnu, (n, half * 2 // MX_GROUP), "Fp4Weight scale")

    @property
    def shape(self) -> tuple[int, int]:
        """`(N, K)`."""
        n, half = _matrix_shape(self.packed, "Fp4Weight packed")
        return n, 2 * half

    def rows(self, start: int, stop: int) -> Self:
        """Rows `start:stop` as a view."""
        return dataclasses.replace(self, packed=self.packed[start:stop], scale=self.scale[start:stop])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """`[N, K]`: code times scale, exact as far as the range of `dtype`, FP32 or BF16, goes.

        A product beyond it becomes infinite; BF16 loses bits below 2^-126.
        """
        return self.decoder(dtype, new_matrix)(0, self.shape[0])

    def decoder(self, dtype: torch.dtype = torch.float32, matrix: MatrixMaker = scratch_matrix) -> RowDecoder:
        """`dequantize` for callers that take rows `start:stop` one after the other; `matrix` as for `Fp8Weight`."""
        rows = e2m1_rows(self.packed, self.scale, dtype, matrix)
        return lambda start, stop: rows(slice(start, stop))

    def dot(self, x: Tensor) -> Tensor:
        """Dot products `[..., N]` of rows `x [..., K]` with this matrix: FP32, by E1."""
        return dot_by_rows(x, self.shape[0], self.decoder())


def expect_tensor(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None, where: str) -> None:
    """Refuse what is no tensor of that dtype and, unless it is None, shape, as a `WeightError` at `where`."""
    if not isinstance(tensor, Tensor):
        raise WeightError(where, tensor, "a tensor")
    if tensor.dtype != dtype:
        raise WeightError(where, tensor.dtype, str(dtype))
    if shape is not None and tensor.shape != shape:
        raise WeightError(where, tuple(tensor.shape), str(shape))


def _check_tile_range(where: str, start: int, stop: int) -> None:
    """A part of a tile would get the scale of its neighbour."""
    if start % MX_GROUP or stop % MX_GROUP:
        raise WeightError(where, (start, stop), f"multiples of {MX_GROUP}")


def _matrix_shape(tensor: Tensor, where: str) -> tuple[int, int]:
    if tensor.dim() != 2:
        raise WeightError(where, tuple(tensor.shape), "two dimensions")
    return tensor.shape[0], tensor.shape[1]
