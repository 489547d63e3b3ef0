"""Exact arithmetic: the rules that make a result independent of library, threads and batch shape (model.md section 3).

The release fixes codes, scales and rounding boundaries; a device leaves the order inside a sum and the last bit
of a transcendental function open. Here both are closed: sums and functions are evaluated in float64 and rounded
once to FP32 (rules E1 to E3).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from v41_goldens.scratch import scratch

_CHUNK_ELEMENTS = 1 << 19
"""float64 weight elements converted at a time (4 MB): a chunk stays in cache between conversion and product."""

_SPLIT_ELEMENTS = 1 << 22
"""Activation elements that `dot_fp32` splits at a time (32 MB for each float64 copy)."""


def dot(x: Tensor, w: Tensor) -> Tensor:
    """Dot products of the rows of `x` with the rows of `w` (E1; model.md section 3).

    Args:
        x: `[..., M, K]`, any float dtype.
        w: `[..., N, K]`, any float dtype, output-major as every weight of the checkpoint.

    Returns:
        FP32 `[..., M, N]`: float64 products summed in float64, one rounding to FP32; zero is +0.
    """
    return dot_by_rows(x, w.shape[-2], lambda start, stop: w[..., start:stop, :])


@torch.no_grad()  # which a product with memory that is used again cannot have
def dot_by_rows(x: Tensor, n: int, rows: Callable[[int, int], Tensor]) -> Tensor:
    """`dot` for weights that are made a few rows at a time, so that float64 copies stay small (E1).

    Args:
        x: `[..., M, K]`, any float dtype.
        n: number of weight rows.
        rows: gives rows `start:stop` of the weights `[..., stop - start, K]`, any float dtype; both bounds are
            multiples of 32, except that `stop` may be `n`.

    Returns:
        FP32 `[..., M, n]`.
    """
    x64 = x.to(torch.float64)
    step = max(32, _CHUNK_ELEMENTS // max(1, x.shape[-1]) // 32 * 32)

    def chunk(start: int) -> Tensor:
        w = rows(start, min(start + step, n))
        w64 = scratch(w.numel(), torch.float64, w.device).view(w.shape).copy_(w)
        return _round(torch.matmul(x64, w64.transpose(-1, -2)))

    return chunk(0) if n <= step else torch.cat([chunk(start) for start in range(0, n, step)], dim=-1)


def dot_fp32(x: Tensor, w: Tensor) -> Tensor:
    """`dot` for weights with all 24 bits of FP32 (E1), where a plain float64 sum still depends on its order.

    Products of BF16 or narrower numbers leave float64 room to sum thousands of them exactly; 24-bit weights do not,
    and a GEMM picks another order for another batch shape. So `x` and `w` are each cut into a leading part, short
    enough that its products sum exactly, and a rest about 2^-17 of the largest element. Order then only touches
    bits 2^17 below the last one of float64.

    Args:
        x: `[M, K]`, any float dtype.
        w: FP32 `[N, K]`.

    Returns:
        FP32 `[M, N]`.
    """
    w64 = w.to(torch.float64)
    bits = (50 - max(1, x.shape[-1] - 1).bit_length()) // 2
    w_lead, w_rest = _split(w64, bits)

    def block(rows: Tensor) -> Tensor:
        lead, rest = _split(rows.to(torch.float64), bits)
        small = torch.matmul(lead, w_rest.T).add_(torch.matmul(rest, w64.T))
        return _round(torch.matmul(lead, w_lead.T).add_(small))

    rows_at_once = max(1, _SPLIT_ELEMENTS // max(1, x.shape[-1]))
    blocks = [block(rows) for rows in x.split(rows_at_once)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def total(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """FP32 sum over `dim`, taken in float64 and rounded once; never -0 (E3; model.md section 3)."""
    return _round(x.sum(dim, keepdim=keepdim, dtype=torch.float64))


def mean(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """FP32 mean over `dim`, taken in float64 and rounded once; never -0 (E3; model.md section 3)."""
    return _round(x.mean(dim, keepdim=keepdim, dtype=torch.float64))


def exp(x: Tensor) -> Tensor:
    """FP32 exponential, evaluated in float64 (E2)."""
    return _function(torch.exp, x)


def sigmoid(x: Tensor) -> Tensor:
    """FP32 logistic function, evaluated in float64 (E2)."""
    return _function(torch.sigmoid, x)


def softplus(x: Tensor) -> Tensor:
    """FP32 `log(1 + exp(x))`, evaluated in float64 (E2); keeps its value far below zero, where `1 + exp(x)` is 1."""
    return _function(torch.nn.functional.softplus, x)


def silu(x: Tensor) -> Tensor:
    """FP32 `x * sigmoid(x)`, evaluated in float64 (E2)."""
    return _function(torch.nn.functional.silu, x)


def sqrt(x: Tensor) -> Tensor:
    """FP32 square root, evaluated in float64 (E2)."""
    return _function(torch.sqrt, x)


def rsqrt(x: Tensor) -> Tensor:
    """FP32 `1 / sqrt(x)`, evaluated in float64 (E2)."""
    return _function(torch.rsqrt, x)


def cos(x: Tensor) -> Tensor:
    """FP32 cosine of an FP32 angle in radians, evaluated in float64 (E2)."""
    return _function(torch.cos, x)


def sin(x: Tensor) -> Tensor:
    """FP32 sine of an FP32 angle in radians, evaluated in float64 (E2)."""
    return _function(torch.sin, x)


_FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.exp,
    torch.sigmoid,
    torch.nn.functional.softplus,
    torch.nn.functional.silu,
    torch.sqrt,
    torch.rsqrt,
    torch.cos,
    torch.sin,
)


@functools.cache
def warm_up() -> None:
    """Call every function of E2 once on one element; further calls do nothing.

    The first multi-threaded vector `sqrt` or `exp` of a process was seen to be wrong in torch (model.md section 3);
    a first call on a single element, which never runs on several threads, prevents it. Every function of this
    module calls this first, so nobody else needs to. (Threads that arrive together each warm up: harmless.)
    """
    for function in _FUNCTIONS:
        for dtype in (torch.float64, torch.float32):
            function(torch.ones(1, dtype=dtype, device="cpu"))


def _function(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    warm_up()
    return function(x.to(torch.float64)).to(torch.float32)


def _split(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """float64 `lead + rest = x` exactly, `lead` on a grid of about 2^-bits of its row's largest magnitude.

    Adding and subtracting a large number rounds to that number's own grid. With K columns and
    `2 * bits + 3 + log2(K) <= 53`, dot products of two leads are exact in any order.
    """
    magic = x.abs().amax(-1, keepdim=True) * (1.5 * 2.0 ** (52 - bits))
    lead = (x + magic).sub_(magic)
    return lead, x - lead


def _round(x: Tensor) -> Tensor:
    """float64 -> FP32, nearest even; adding +0 turns a -0 into +0 and changes nothing else."""
    return x.to(torch.float32).add_(0.0)
