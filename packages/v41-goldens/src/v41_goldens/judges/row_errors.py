"""Errors of each row in float64, and their statistics: what the judges of other arithmetics decide from."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from v41_goldens.errors import OperandError
from v41_goldens.judges.verdict import first_index

_ELEMENTS_AT_ONCE = 1 << 16
"""Elements converted to float64 at a time: the copies (512 kB each) stay in the cache."""


@dataclass(frozen=True)
class ErrorStatistics:
    """Errors of `rows` judged rows; `worst_row` (None without rows) is the row of the tensor that they rank worst.

    Attributes:
        bad_rows: rows that break a bound of their own.
        non_finite: elements that are infinite or NaN on either side.
        relative_l2: `|actual - expected| / |expected|` over all judged rows (0 where both are zero).
        cosine: between actual and expected over all judged rows (1 where both are zero).
        rms, peak, row_l2: root mean square, largest magnitude and relative L2 of the worst row's error.
        expected_rms: root mean square of the worst row's expected values.
        first_index: the largest error of the first bad row, as an index of the tensor.
    """

    rows: int
    bad_rows: int
    non_finite: int
    relative_l2: float
    cosine: float
    worst_row: int | None
    rms: float
    peak: float
    row_l2: float
    expected_rms: float
    first_index: tuple[int, ...] | None

    def __str__(self) -> str:
        whole = f"{self.rows} rows: relative L2 {self.relative_l2:.3g}, cosine {self.cosine:.6f}"
        if self.worst_row is None:
            return whole
        return (
            f"{whole}; worst row {self.worst_row}: RMS {self.rms:.3g}, peak {self.peak:.3g}, relative L2 "
            f"{self.row_l2:.3g}, expected RMS {self.expected_rms:.3g}"
        )


@dataclass(frozen=True)
class RowErrors:
    """Errors of the judged rows; a row is everything behind the first index of the tensor, so one token.

    float64 `[N]` but for the first three. An element that is not finite on either side has an infinite error, and
    counts as zero in what is expected.

    Attributes:
        actual, expected: the two tensors `[T, ...]`.
        number: INT64 `[N]`, which rows of them are judged.
        rms, peak: root mean square and largest magnitude of each row's error.
        expected_rms, found_rms: root mean square of its expected and found values.
        product: mean product of expected and found values.
        non_finite: how many of its elements are not finite.
    """

    actual: Tensor
    expected: Tensor
    number: Tensor
    rms: Tensor
    peak: Tensor
    expected_rms: Tensor
    found_rms: Tensor
    product: Tensor
    non_finite: Tensor

    def statistics(self, bad: Tensor, excess: Tensor) -> ErrorStatistics:
        """`bad` bool `[N]`: rows beyond a bound; `excess` float64 `[N]`: what ranks the worst row."""
        expected, found = float(self.expected_rms.norm()), float(self.found_rms.norm())
        cosine = 1.0
        if expected or found:
            cosine = float(self.product.sum()) / (expected * found) if expected * found else 0.0
        worst = int(excess.argmax()) if len(excess) else None
        rms, peak, expected_rms = (
            0.0 if worst is None else float(values[worst]) for values in (self.rms, self.peak, self.expected_rms)
        )
        return ErrorStatistics(
            rows=len(self.number),
            bad_rows=int(bad.sum()),
            non_finite=int(self.non_finite.sum()),
            relative_l2=_ratio(float(self.rms.norm()), expected),
            cosine=cosine,
            worst_row=None if worst is None else int(self.number[worst]),
            rms=rms,
            peak=peak,
            row_l2=_ratio(rms, expected_rms),
            expected_rms=expected_rms,
            first_index=self._largest_error_of_first(bad),
        )

    def _largest_error_of_first(self, bad: Tensor) -> tuple[int, ...] | None:
        at = first_index(bad)
        if at is None:
            return None
        row = int(self.number[at])
        error = _difference(self.actual[row], self.expected[row])[0].abs()
        return (row, *(first_index(error == error.amax()) or ()))


def row_errors(actual: Tensor, expected: Tensor, active: int | Tensor | None) -> RowErrors:
    """Errors of two tensors of one shape and floating dtype, of their active rows alone.

    Args:
        actual, expected: `[T, ...]`.
        active: how many of the first rows are judged, or bool `[T]`; None for all of them.

    Raises:
        OperandError: tensors without rows, with empty ones or not of floating point, or `active` does not fit.
    """
    if expected.dim() < 2 or 0 in expected.shape[1:] or not expected.dtype.is_floating_point:
        raise OperandError("row_errors expected", (expected.dtype, tuple(expected.shape)),
                           "floating point [T, ...], with something in a row")  # fmt: skip
    number = active_rows(active, len(expected), expected.device).nonzero().squeeze(1)
    at_once = max(1, _ELEMENTS_AT_ONCE // math.prod(expected.shape[1:]))
    parts = [_row_numbers(actual[rows], expected[rows]) for rows in number.split(at_once)]
    columns = (torch.cat(column) for column in zip(*parts, strict=True))
    return RowErrors(actual, expected, number, *columns)


def _row_numbers(actual: Tensor, expected: Tensor) -> tuple[Tensor, ...]:
    """The fields of `RowErrors` from `rms` to `non_finite`, of some rows."""
    error, non_finite = _difference(actual, expected)
    error, non_finite = error.flatten(1), non_finite.flatten(1)
    e = expected.to(torch.float64).flatten(1).masked_fill(non_finite, 0.0)
    found = e + error
    rms, expected_rms, found_rms = (values.square().mean(1).sqrt() for values in (error, e, found))
    return rms, error.abs().amax(1), expected_rms, found_rms, (e * found).mean(1), non_finite.sum(1)


def _difference(actual: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """float64 `actual - expected`, infinite where either is not finite, and bool: where that is."""
    a, e = actual.to(torch.float64), expected.to(torch.float64)
    non_finite = ~(a.isfinite() & e.isfinite())
    return (a - e).masked_fill_(non_finite, math.inf), non_finite


def active_rows(active: int | Tensor | None, rows: int, device: torch.device) -> Tensor:
    """Bool `[rows]` from a count of first rows, a mask, or None for all.

    Raises:
        OperandError: a count outside 0 to `rows`, or a mask of another shape or dtype.
    """
    if active is None:
        return torch.ones(rows, dtype=torch.bool, device=device)
    if isinstance(active, Tensor):
        if active.dtype != torch.bool or active.shape != (rows,):
            raise OperandError("active", (active.dtype, tuple(active.shape)), f"bool [{rows}], one for each row")
        return active
    if not 0 <= active <= rows:
        raise OperandError("active", active, f"0 to {rows}, the number of rows")
    return torch.arange(rows, device=device) < active


def _ratio(error: float, size: float) -> float:
    """`error / size`, and 0 for no error of nothing."""
    if size:
        return error / size
    return math.inf if error else 0.0
