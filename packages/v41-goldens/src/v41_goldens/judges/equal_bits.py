"""Equality to the bit: goldens, stored bytes, and operators that leave no choice of arithmetic (model.md section 3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from v41_goldens.judges.verdict import Verdict, first_index, unlike

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def unequal_bits(actual: Tensor, expected: Tensor) -> Tensor:
    """Where two tensors of one shape and dtype differ in any bit: -0 is not +0, and one NaN equals only the same NaN.

    Returns:
        BOOL tensor of that shape.
    """
    bits = _BITS[expected.element_size()]
    return actual.contiguous().view(bits) != expected.contiguous().view(bits)


@dataclass(frozen=True, kw_only=True, repr=False)
class EqualBitsVerdict(Verdict):
    """`unequal` of `elements` differ, the first one at `first_index`."""

    elements: int
    unequal: int
    first_index: tuple[int, ...] | None = None

    @property
    def statistics(self) -> str:
        return f"{self.unequal} of {self.elements} elements differ"


def judge_equal_bits(actual: Tensor, expected: Tensor) -> EqualBitsVerdict:
    """Shape, dtype and every bit agree.

    This judges storage, where poison is legitimate: a NaN is accepted where the same NaN is expected.
    """
    rule, elements = "the same dtype, shape and bits", expected.numel()
    reasons = unlike(actual, expected)
    if reasons:
        return EqualBitsVerdict(rule=rule, reasons=reasons, elements=elements, unequal=elements)
    unequal = unequal_bits(actual, expected)
    index = first_index(unequal)
    if index is not None:
        reasons = (f"first at {list(index)}: expected {_shown(expected[index])}, found {_shown(actual[index])}",)
    return EqualBitsVerdict(
        rule=rule, reasons=reasons, elements=elements, unequal=int(unequal.sum()), first_index=index
    )


def assert_equal_bits(actual: Tensor, expected: Tensor, name: str) -> None:
    """Raise `JudgementError` unless shape, dtype and every bit of the result called `name` agree."""
    judge_equal_bits(actual, expected).require(name)


def _shown(element: Tensor) -> str:
    """A value and its bits, since -0 and the many NaNs print alike."""
    size = element.element_size()
    bits = int(element.view(_BITS[size])) & ((1 << 8 * size) - 1)
    return f"{element.double().item() if element.is_floating_point() else element.item()} (0x{bits:0{2 * size}x})"
