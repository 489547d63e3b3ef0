"""Errors of each row in float64, and their statistics: what the judges of other arithmetics decide from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from v41_goldens.errors import OperandError
from v41_goldens.judges.verdict import first_index


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

    An element that is not finite on either side has an infinite error.

    Attributes:
        number: INT64 `[N]`, which rows of the tensor are judged.
        error, expected: float64 `[N, W]`.
        non_finite: bool `[N, W]`.
        row_shape: shape of one row before it was flattened to W.
    """

    number: Tensor
    error: Tensor
    expected: Tensor
    non_finite: Tensor
    row_shape: tuple[int, ...]

    @cached_property
    def rms(self) -> Tensor:
        """Root mean square of each row's error, float64 `[N]`."""
        return _rms(self.error)

    @cached_property
    def expected_rms(self) -> Tensor:
        """Root mean square of each row's expected values, float64 `[N]`."""
        return _rms(self.expected)

    @cached_property
    def peak(self) -> Tensor:
        """Largest magnitude of each row's error, float64 `[N]`."""
        return self.error.abs().amax(1) if self.error.shape[1] else self.error.new_zeros(len(self.error))

    def statistics(self, bad: Tensor, excess: Tensor) -> ErrorStatistics:
        """`bad` bool `[N]`: rows beyond a bound; `excess` float64 `[N]`: what ranks the worst row."""
        found = self.expected + self.error
        expected_norm, found_norm = float(self.expected.norm()), float(found.norm())
        cosine = 1.0
        if expected_norm or found_norm:
            product = expected_norm * found_norm
            cosine = float((self.expected * found).sum()) / product if product else 0.0
        numbers = dict.fromkeys(("rms", "peak", "row_l2", "expected_rms"), 0.0)
        worst = None
        if len(self.number):
            at = int(excess.nan_to_num(nan=math.inf).argmax())
            worst, rms, expected_rms = int(self.number[at]), float(self.rms[at]), float(self.expected_rms[at])
            numbers = {
                "rms": rms,
                "peak": float(self.peak[at]),
                "row_l2": _ratio(rms, expected_rms),
                "expected_rms": expected_rms,
            }
        return ErrorStatistics(
            rows=len(self.number),
            bad_rows=int(bad.sum()),
            non_finite=int(self.non_finite.sum()),
            relative_l2=_ratio(float(self.error.norm()), expected_norm),
            cosine=cosine,
            worst_row=worst,
            first_index=self._largest_error_of_first(bad),
            **numbers,
        )

    def _largest_error_of_first(self, bad: Tensor) -> tuple[int, ...] | None:
        row = first_index(bad)
        if row is None:
            return None
        errors = self.error[row].abs().view(self.row_shape)
        return (int(self.number[row]), *(first_index(errors == errors.amax()) or ()))


def row_errors(actual: Tensor, expected: Tensor, active: int | Tensor | None) -> RowErrors:
    """Errors of two tensors of one shape and floating dtype, of their active rows alone.

    Args:
        actual, expected: `[T, ...]`.
        active: how many of the first rows are judged, or bool `[T]`; None for all of them.

    Raises:
        OperandError: tensors that have no rows or are not floating point, or `active` does not fit them.
    """
    if expected.dim() < 2 or not expected.dtype.is_floating_point:
        raise OperandError("row_errors expected", (expected.dtype, tuple(expected.shape)), "floating point [T, ...]")
    rows = active_rows(active, len(expected), expected.device).nonzero().squeeze(1)
    a, e = (tensor[rows].to(torch.float64).flatten(1) for tensor in (actual, expected))
    non_finite = ~(a.isfinite() & e.isfinite())
    error = (a - e).masked_fill_(non_finite, math.inf)
    return RowErrors(rows, error, e.masked_fill(non_finite, 0.0), non_finite, tuple(expected.shape[1:]))


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


def _rms(x: Tensor) -> Tensor:
    return x.square().mean(1).sqrt() if x.shape[1] else x.new_zeros(len(x))


def _ratio(error: float, size: float) -> float:
    """`error / size`, and 0 for no error of nothing."""
    if size:
        return error / size
    return math.inf if error else 0.0
