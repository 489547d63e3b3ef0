"""Comparison to the bit: what a golden, a kernel or a stored vector has to pass (model.md section 3)."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def unequal_bits(actual: Tensor, expected: Tensor) -> Tensor:
    """Where two tensors of one shape and dtype differ in any bit: -0 is not +0, and one NaN equals only the same NaN.

    Returns:
        BOOL tensor of that shape.
    """
    bits = _BITS[expected.element_size()]
    return actual.contiguous().view(bits) != expected.contiguous().view(bits)


def assert_equal_bits(actual: Tensor, expected: Tensor, name: str) -> None:
    """Raise `AssertionError` unless shape, dtype and every bit agree; the message shows the first differing element."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"{name}: expected {expected.dtype} {list(expected.shape)}, found {actual.dtype} {list(actual.shape)}"
        )
    unequal = unequal_bits(actual, expected)
    count = int(unequal.sum())
    if count:
        index = tuple(unequal.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {count} of {unequal.numel()} elements differ, first {list(index)}: "
            f"expected {expected[index]!r}, found {actual[index]!r}"
        )
