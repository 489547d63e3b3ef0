"""A bound on the RMS and one on the peak of every row's error, for outputs of another arithmetic.

No row can hide behind others: there is no quota of outliers, and no average over rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from v41_goldens.errors import OperandError
from v41_goldens.judges.row_errors import ErrorStatistics, RowErrors, row_errors
from v41_goldens.judges.verdict import Verdict, unlike


@dataclass(frozen=True)
class RowBounds:
    """What the error of a row may be, in terms of the RMS of what is expected there:

    `RMS(error) <= rms_floor + rms_ratio * RMS(expected)` and `max |error| <= peak_floor + peak_ratio * RMS(expected)`.
    The floors cover rows near zero.
    """

    rms_floor: float = 1e-6
    rms_ratio: float = 0.01
    peak_floor: float = 1e-5
    peak_ratio: float = 0.05

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0.0 <= value < math.inf:
                raise OperandError(f"RowBounds.{name}", value, "a finite number of at least 0")

    def __str__(self) -> str:
        return (
            f"RMS(error) <= {self.rms_floor:g} + {self.rms_ratio:g} RMS(expected) and "
            f"max |error| <= {self.peak_floor:g} + {self.peak_ratio:g} RMS(expected) in every row, all finite"
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class RowBoundsVerdict(Verdict):
    """`errors` is None where dtype or shape already differ."""

    errors: ErrorStatistics | None = None

    @property
    def statistics(self) -> str:
        return str(self.errors)


ROW_BOUNDS = RowBounds()
"""The bounds of attention outputs."""


def judge_row_bounds(
    actual: Tensor, expected: Tensor, active: int | Tensor | None = None, bounds: RowBounds = ROW_BOUNDS
) -> RowBoundsVerdict:
    """RMS and peak of every active row's error within a bound each; all finite.

    Args:
        actual, expected: `[T, ...]` of one floating dtype; a row is everything behind the first index.
        active: how many of the first rows count, or bool `[T]`; the others belong to `judge_zero_rows` or
            `judge_untouched_rows`.

    Raises:
        OperandError: operands without rows, or `active` does not fit them.
    """
    reasons = unlike(actual, expected)
    if reasons:
        return RowBoundsVerdict(rule=str(bounds), reasons=reasons)
    errors = row_errors(actual, expected, active)
    rms_bad, rms_excess = _beyond(errors.rms, errors, bounds.rms_floor, bounds.rms_ratio)
    peak_bad, peak_excess = _beyond(errors.peak, errors, bounds.peak_floor, bounds.peak_ratio)
    bad = rms_bad | peak_bad
    statistics = errors.statistics(bad, rms_excess.maximum(peak_excess))
    found = list[str]()
    if statistics.non_finite:
        found.append(f"{statistics.non_finite} elements are not finite")
    if statistics.bad_rows:
        in_rms, in_peak = int(rms_bad.sum()), int(peak_bad.sum())
        found.append(
            f"{statistics.bad_rows} of {statistics.rows} rows are beyond a bound ({in_rms} in RMS, {in_peak} in peak), "
            f"the first at {list(statistics.first_index or ())}"
        )
    return RowBoundsVerdict(rule=str(bounds), reasons=tuple(found), errors=statistics)


def assert_row_bounds(
    actual: Tensor, expected: Tensor, name: str, active: int | Tensor | None = None, bounds: RowBounds = ROW_BOUNDS
) -> None:
    """Raise `JudgementError` unless `judge_row_bounds` accepts the result called `name`."""
    judge_row_bounds(actual, expected, active, bounds).require(name)


def _beyond(size: Tensor, errors: RowErrors, floor: float, ratio: float) -> tuple[Tensor, Tensor]:
    """Rows whose error is too large, and its ratio to what is allowed (infinite where nothing is)."""
    allowed = floor + ratio * errors.expected_rms
    # Written so that a NaN, and an infinity on either side, is beyond the bound.
    within = (size <= allowed) & size.isfinite()
    return ~within, (size / allowed).where(size != 0, 0.0)
