"""Rows behind the active ones: exactly zero where an operator clears them, otherwise exactly as they were before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from v41_config import ParallelLayout
from v41_goldens.errors import OperandError
from v41_goldens.judges.equal_bits import unequal_bits
from v41_goldens.judges.row_errors import active_rows
from v41_goldens.judges.verdict import Fault, Verdict, faulty, first_index, reasons_of, unlike


@dataclass(frozen=True, kw_only=True, repr=False)
class InactiveRowsVerdict(Verdict):
    """Statistics of inactive rows.

    Attributes:
        rows: inactive rows judged.
        bad_rows: those that hold anything wrong.
        first_index: first wrong element, as an index of the tensor; of several shards, with the shard's number first.
    """

    rows: int = 0
    bad_rows: int = 0
    first_index: tuple[int, ...] | None = None

    @property
    def statistics(self) -> str:
        return f"{self.bad_rows} of {self.rows} inactive rows bad"


def judge_zero_rows(actual: Tensor, active: int | Tensor) -> InactiveRowsVerdict:
    """Every byte of the inactive rows is zero: no sentinel, no result of a padding row, no -0.

    Args:
        actual: `[T, ...]`, any dtype.
        active: how many of the first rows are active, or bool `[T]`.

    Raises:
        OperandError: `active` does not fit the rows.
    """
    inactive = ~active_rows(active, len(actual), actual.device)
    wrong = unequal_bits(actual, torch.zeros_like(actual))
    return _verdict("every byte of the inactive rows zero", inactive, wrong, "elements that are not zero")


def judge_untouched_rows(actual: Tensor, before: Tensor, active: int | Tensor) -> InactiveRowsVerdict:
    """Every byte of the inactive rows is what it was before the call, a sentinel or NaN included.

    Args:
        actual, before: `[T, ...]`, any dtype: the destination after and before the call.
        active: how many of the first rows are active, or bool `[T]`.

    Raises:
        OperandError: `active` does not fit the rows.
    """
    rule = "every byte of the inactive rows as before"
    reasons = unlike(actual, before)
    if reasons:
        return InactiveRowsVerdict(rule=rule, reasons=reasons)
    inactive = ~active_rows(active, len(actual), actual.device)
    return _verdict(rule, inactive, unequal_bits(actual, before), "elements that were written")


def judge_zero_shards(
    shards: Sequence[Tensor], layout: ParallelLayout, capacity: int, active: int
) -> InactiveRowsVerdict:
    """What `judge_zero_rows` accepts, of every rank's slab in a TP group, those without an active row included.

    Args:
        shards: `[T_local, ...]` of each rank in TP order, `T_local = ceil(capacity / tp)`.
        capacity, active: the group's rows, and how many of the first ones are tokens.

    Raises:
        OperandError: another number of shards than `tp`.
        LayoutError: `active` is not between 0 and `capacity`.
    """
    if len(shards) != layout.tp:
        raise OperandError("judge_zero_shards shards", len(shards), f"one for each of {layout.tp} ranks")
    rule, rows, reasons = "every byte of the inactive rows of every rank zero", layout.slab_rows(capacity), list[str]()
    judged, bad, first = 0, 0, None
    for rank, shard in enumerate(shards):
        if len(shard) != rows:
            reasons.append(f"rank {rank}: expected {rows} rows, found {len(shard)}")
            continue
        verdict = judge_zero_rows(shard, layout.active_rows(capacity, active, rank))
        reasons += [f"rank {rank}: {reason}" for reason in verdict.reasons]
        judged, bad = judged + verdict.rows, bad + verdict.bad_rows
        if first is None and verdict.first_index is not None:
            first = (rank, *verdict.first_index)
    return InactiveRowsVerdict(rule=rule, reasons=tuple(reasons), rows=judged, bad_rows=bad, first_index=first)


def assert_zero_rows(actual: Tensor, active: int | Tensor, name: str) -> None:
    """Raise `JudgementError` unless `judge_zero_rows` accepts the result called `name`."""
    judge_zero_rows(actual, active).require(name)


def assert_untouched_rows(actual: Tensor, before: Tensor, active: int | Tensor, name: str) -> None:
    """Raise `JudgementError` unless `judge_untouched_rows` accepts the result called `name`."""
    judge_untouched_rows(actual, before, active).require(name)


def assert_zero_shards(shards: Sequence[Tensor], layout: ParallelLayout, capacity: int, active: int, name: str) -> None:
    """Raise `JudgementError` unless `judge_zero_shards` accepts the shards called `name`."""
    judge_zero_shards(shards, layout, capacity, active).require(name)


def _verdict(rule: str, inactive: Tensor, wrong: Tensor, problem: str) -> InactiveRowsVerdict:
    faults = [Fault(wrong & inactive.view(-1, *(1,) * (wrong.dim() - 1)), problem)]
    bad = faulty(faults, wrong)
    return InactiveRowsVerdict(
        rule=rule,
        reasons=reasons_of(faults),
        rows=int(inactive.sum()),
        bad_rows=int(bad.flatten(1).any(1).sum()) if bad.dim() > 1 else int(bad.sum()),
        first_index=first_index(bad),
    )
