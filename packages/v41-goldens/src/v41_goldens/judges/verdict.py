"""What every judge returns: a verdict with the rule, the reasons against and the statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from v41_goldens.errors import JudgementError


@dataclass(frozen=True, kw_only=True, repr=False)
class Verdict(ABC):
    """Accepted if there is no reason against.

    A verdict is true if it accepts and its repr tells why it does not, so `assert judge_row_bounds(...)` shows the
    statistics in a test report; `require` raises with the result's name.

    Attributes:
        rule: what was demanded.
        reasons: each way in which it was broken.
    """

    rule: str
    reasons: tuple[str, ...] = ()

    @property
    def accepted(self) -> bool:
        """Whether nothing speaks against the result."""
        return not self.reasons

    @property
    @abstractmethod
    def statistics(self) -> str:
        """The verdict's numbers in words."""

    def __bool__(self) -> bool:
        return self.accepted

    def __repr__(self) -> str:
        return "; ".join((*(self.reasons or ("accepted",)), self.statistics))

    def require(self, name: str) -> None:
        """Raise `JudgementError` about the result called `name` unless it is accepted."""
        __tracebackhide__ = True
        if self.reasons:
            raise JudgementError(name, self, self.rule)


def unlike(actual: Tensor, expected: Tensor) -> tuple[str, ...]:
    """A reason if dtype or shape differ: a result of another kind is wrong before any element is looked at."""
    if actual.dtype == expected.dtype and actual.shape == expected.shape:
        return ()
    return (f"expected {kind(expected)}, found {kind(actual)}",)


def kind(tensor: Tensor) -> str:
    """`torch.bfloat16 [4, 256]`."""
    return f"{tensor.dtype} {list(tensor.shape)}"


def first_index(where: Tensor) -> tuple[int, ...] | None:
    """Index of the first true element of a bool tensor, in row-major order."""
    if not where.any():
        return None
    flat, index = int(where.flatten().int().argmax()), list[int]()
    for size in reversed(where.shape):
        flat, remainder = divmod(flat, size)
        index.append(remainder)
    return tuple(reversed(index))


class Fault(NamedTuple):
    """One kind of fault: `where` bool, one element for each place it can have; `problem` names them in the plural."""

    where: Tensor
    problem: str


def reasons_of(faults: Sequence[Fault]) -> tuple[str, ...]:
    """For each kind that occurs: `3 entries named twice, first at [7, 2]`."""
    return tuple(
        f"{int(fault.where.sum())} {fault.problem}, first at {list(first_index(fault.where) or ())}"
        for fault in faults
        if fault.where.any()
    )


def faulty(faults: Sequence[Fault], places: Tensor) -> Tensor:
    """Bool tensor of the shape of `places`: where there is any fault."""
    result = torch.zeros_like(places, dtype=torch.bool)
    for fault in faults:
        result |= fault.where
    return result
