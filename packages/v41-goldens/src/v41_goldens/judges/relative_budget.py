"""A budget in relative L2, overall and of every row, and in cosine, for outputs of another arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from v41_goldens.errors import OperandError
from v41_goldens.judges.row_errors import ErrorStatistics, row_errors
from v41_goldens.judges.verdict import Verdict, unlike


@dataclass(frozen=True)
class RelativeBudget:
    """Relative L2 distance of all rows together and of each row, and the cosine of all rows together."""

    l2: float = 0.01
    row_l2: float = 0.02
    cosine: float = 0.9999

    def __post_init__(self) -> None:
        for name, value in (("l2", self.l2), ("row_l2", self.row_l2)):
            if not 0.0 <= value < math.inf:
                raise OperandError(f"RelativeBudget.{name}", value, "a finite number of at least 0")
        if not 0.0 <= self.cosine <= 1.0:
            raise OperandError("RelativeBudget.cosine", self.cosine, "a number from 0 to 1")

    def __str__(self) -> str:
        return (
            f"relative L2 <= {self.l2:g} overall and <= {self.row_l2:g} in every row, cosine >= {self.cosine:g}, "
            "all finite"
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class RelativeBudgetVerdict(Verdict):
    """`errors` is None where dtype or shape already differ."""

    errors: ErrorStatistics | None = None

    @property
    def statistics(self) -> str:
        return str(self.errors)


RELATIVE_BUDGET = RelativeBudget()
"""The budget of attention outputs."""


def judge_relative_budget(
    actual: Tensor, expected: Tensor, active: int | Tensor | None = None, budget: RelativeBudget = RELATIVE_BUDGET
) -> RelativeBudgetVerdict:
    """Relative L2 of all active rows together and of each one, and their cosine, within the budget; all finite.

    A row of zeros has to be met exactly: there is no absolute floor.

    Args:
        actual, expected: `[T, ...]` of one floating dtype; a row is everything behind the first index.
        active: how many of the first rows count, or bool `[T]`; the others belong to `judge_zero_rows` or
            `judge_untouched_rows`.

    Raises:
        OperandError: operands without rows, or `active` does not fit them.
    """
    reasons = unlike(actual, expected)
    if reasons:
        return RelativeBudgetVerdict(rule=str(budget), reasons=reasons)
    errors = row_errors(actual, expected, active)
    rms, expected_rms = errors.rms, errors.expected_rms
    bad = ~((rms <= budget.row_l2 * expected_rms) & rms.isfinite())
    statistics = errors.statistics(bad, (rms / expected_rms).where(rms != 0, 0.0))
    found = list[str]()
    if statistics.non_finite:
        found.append(f"{statistics.non_finite} elements are not finite")
    if statistics.bad_rows:
        found.append(
            f"{statistics.bad_rows} of {statistics.rows} rows are beyond the budget of a row, "
            f"the first at {list(statistics.first_index or ())}"
        )
    if not statistics.relative_l2 <= budget.l2:
        found.append(f"relative L2 is {statistics.relative_l2:.3g}")
    if not statistics.cosine >= budget.cosine:
        found.append(f"cosine is {statistics.cosine:.6f}")
    return RelativeBudgetVerdict(rule=str(budget), reasons=tuple(found), errors=statistics)


def assert_relative_budget(
    actual: Tensor,
    expected: Tensor,
    name: str,
    active: int | Tensor | None = None,
    budget: RelativeBudget = RELATIVE_BUDGET,
) -> None:
    """Raise `JudgementError` unless `judge_relative_budget` accepts the result called `name`."""
    judge_relative_budget(actual, expected, active, budget).require(name)
