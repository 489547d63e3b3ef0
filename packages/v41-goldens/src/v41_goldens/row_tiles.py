"""Matrix products on tiles of a fixed size, so that a row's bits do not depend on the rows beside it.

A GEMM may choose another order of summation for another number of rows. Here it always gets `ROW_TILE` of them, the
missing ones zero, and weight rows in chunks that only the weight's shape decides.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ROW_TILE = 32
"""Rows of every product: a GEMM is near its full speed there, and an expert's few rows are not padded too far."""

_CHUNK_ELEMENTS = 1 << 20
"""Weight elements made at a time (2 MB in BF16): they stay in cache between dequantisation and product."""


@torch.no_grad()  # which results written in place cannot have
def matmul(x: Tensor, n: int, rows: Callable[[int, int], Tensor]) -> Tensor:
    """`x @ W.T` with FP32 sums, rounded to the operands' dtype.

    Args:
        x: BF16 or FP32 `[R, K]`.
        n: number of weight rows.
        rows: gives rows `start:stop` of W, of the same dtype `[stop - start, K]`; both are multiples of 32, except
            that `stop` may be `n`.

    Returns:
        `[R, n]` of that dtype.
    """
    count, k = x.shape
    tiles = pad_rows(x).unflatten(0, (-1, ROW_TILE))
    # Transposed: on a CPU the left operand of a product is read as it lies, the right one is packed first, each time.
    result = x.new_empty(len(tiles), n, ROW_TILE)
    step = weight_rows_at_once(k)
    columns = tiles.transpose(1, 2).unbind()
    for start in range(0, n, step) if count else ():
        stop = min(start + step, n)
        w = rows(start, stop)
        for tile, part in zip(columns, result[:, start:stop].unbind(), strict=True):
            torch.mm(w, tile, out=part)
    return result.transpose(1, 2).flatten(0, 1)[:count]


def fp32_linear(x: Tensor, w: Tensor) -> Tensor:
    """FP32 `[..., N]` of `x [..., K]` and `w [N, K]`, of any float dtype, summed in FP32."""
    product = matmul(x.float().reshape(-1, x.shape[-1]), len(w), lambda start, stop: w[start:stop].float())
    return product.view(*x.shape[:-1], len(w))


def weight_rows_at_once(k: int) -> int:
    """Rows of a weight of `k` columns that are made at a time, a multiple of 32."""
    return max(32, _CHUNK_ELEMENTS // max(1, k) // 32 * 32)


def pad_rows(x: Tensor) -> Tensor:
    """`x` `[R, ...]` with zero rows up to a multiple of `ROW_TILE`."""
    missing = -len(x) % ROW_TILE
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x
