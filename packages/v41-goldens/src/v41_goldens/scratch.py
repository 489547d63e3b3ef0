"""Memory on the way from one tensor to another that is used again, call after call.

On a CPU, fresh memory of some MB costs more than what is computed in it: the system clears every page of it, and takes
it back as soon as it is free.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor


class _Kept(threading.local):
    """The memory of one thread, by dtype."""

    def __init__(self) -> None:
        self.tensors: dict[torch.dtype, Tensor] = {}


_KEPT = _Kept()

_LARGEST_BYTES = 8 << 20
"""More than that is not kept."""

_GAP_BYTES = 64
"""Between the rows of a matrix: a line of the cache."""

MatrixMaker = Callable[[int, int, torch.dtype, torch.device], Tensor]
"""Gives memory for `rows`, `columns`, dtype and device."""


def scratch(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[count]` uninitialised elements, this thread's until it asks for the same dtype again.

    Other devices than the CPU have an allocator that keeps memory, and streams that may still use it: there, and where
    more is asked for than is kept, the tensor is a new one.
    """
    if device.type != "cpu" or count * dtype.itemsize > _LARGEST_BYTES:
        return torch.empty(count, dtype=dtype, device=device)
    kept = _KEPT.tensors.get(dtype)
    if kept is None or len(kept) < count:
        with torch.inference_mode(False):  # one that was made in this mode could not be written outside of it
            kept = _KEPT.tensors[dtype] = torch.empty(count, dtype=dtype, device=device)
    return kept[:count]


def scratch_matrix(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[rows, columns]` of `scratch`, with a gap behind each row.

    Rows a multiple of 4 KB apart compete for the same places in a CPU's cache: a product of such a matrix takes half
    as long again.
    """
    stride = columns + _GAP_BYTES // dtype.itemsize
    return scratch(rows * stride, dtype, device).view(rows, stride)[:, :columns]


def new_matrix(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[rows, columns]`, contiguous, for results that a caller keeps."""
    return torch.empty(rows, columns, dtype=dtype, device=device)
