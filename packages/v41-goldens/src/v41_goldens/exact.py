"""Exact arithmetic: the rules that make a result independent of library, threads and batch shape (model.md section 3).

The release fixes codes, scales and rounding boundaries; a device leaves the order inside a sum and the last bit
of a transcendental function open. Here both are closed: sums and functions are evaluated in float64 and rounded
once to FP32 (rules E1 to E3).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 18
"""float64 weight elements converted at a time (2 MB): a chunk stays in cache between conversion and product."""


def dot(x: Tensor, w: Tensor) -> Tensor:
    """Dot products of the rows of `x` with the rows of `w` (E1; model.md section 3).

    Args:
        x: `[..., M, K]`, any float dtype.
        w: `[..., N, K]`, any float dtype, output-major as every weight of the checkpoint.

    Returns:
        FP32 `[..., M, N]`: float64 products summed in float64, one rounding to FP32; zero is +0.
    """
    return dot_by_rows(x, w.shape[-2], lambda start, stop: w[..., start:stop, :].to(torch.float64))


def dot_by_rows(x: Tensor, n: int, rows: Callable[[int, int], Tensor]) -> Tensor:
    """`dot` for weights that are made a few rows at a time, so that float64 copies stay small (E1).

    Args:
        x: `[..., M, K]`, any float dtype.
        n: number of weight rows.
        rows: gives rows `start:stop` of the weights as float64 `[..., stop - start, K]`; both bounds are multiples
            of 32, except that `stop` may be `n`.

    Returns:
        FP32 `[..., M, n]`.
    """
    x64 = x.to(torch.float64)
    step = max(32, _CHUNK_ELEMENTS // max(1, x.shape[-1]) // 32 * 32)
    if n <= step:
        return _round(torch.matmul(x64, rows(0, n).transpose(-1, -2)))
    parts = [
        _round(torch.matmul(x64, rows(start, min(start + step, n)).transpose(-1, -2))) for start in range(0, n, step)
    ]
    return torch.cat(parts, dim=-1)


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
_warm = False
_warm_lock = threading.Lock()


def warm_up() -> None:
    """Call every function of E2 once on one element; further calls return at once.

    The first multi-threaded vector `sqrt` or `exp` of a process was seen to be wrong in torch (model.md section 3);
    a first call on a single element, which never runs on several threads, prevents it. Every function of this
    module calls this before its first use, so nobody else needs to.
    """
    global _warm
    if _warm:
        return
    with _warm_lock:
        if not _warm:
            for function in _FUNCTIONS:
                for dtype in (torch.float64, torch.float32):
                    function(torch.ones(1, dtype=dtype))
            _warm = True


def _function(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if not _warm:
        warm_up()
    return function(x.to(torch.float64)).to(torch.float32)


def _round(x: Tensor) -> Tensor:
    """float64 -> FP32, nearest even; adding +0 turns a -0 into +0 and changes nothing else."""
    return x.to(torch.float32).add_(0.0)
