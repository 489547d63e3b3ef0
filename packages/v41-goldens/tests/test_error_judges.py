"""Row bounds and relative budget: what they accept of another arithmetic, and what they must not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from v41_goldens.errors import OperandError
from v41_goldens.judges import (
    JudgementError,
    RelativeBudget,
    RowBounds,
    assert_relative_budget,
    assert_row_bounds,
    judge_relative_budget,
    judge_row_bounds,
    row_errors,
)
from v41_goldens.linear import bf16_linear
from v41_goldens.rms_norm import rms_norm

ROWS, WIDTH = 4096, 64


@pytest.fixture(scope="module")
def expected() -> Tensor:
    """A golden output whose rows differ in size by four orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator).bfloat16()
    size = 10.0 ** torch.linspace(-3, 1, ROWS).unsqueeze(1)
    return (rms_norm(x, torch.ones(WIDTH).bfloat16(), 1e-20).float() * size).bfloat16()


def scaled(expected: Tensor, row: int, factor: float) -> Tensor:
    other = expected.clone()
    other[row] = (other[row].float() * factor).bfloat16()
    return other


def test_another_arithmetic_is_accepted() -> None:
    """A BF16 product with FP32 sums in blocks of 32 columns is not the golden, and within both."""
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(n, 256, generator=generator).bfloat16() for n in (200, 96))
    golden = bf16_linear(x, w)
    blocks = [a.float() @ b.float().T for a, b in zip(x.split(32, dim=1), w.split(32, dim=1), strict=True)]
    other = torch.stack([block.bfloat16().float() for block in blocks]).sum(0).bfloat16()
    assert not torch.equal(other, golden)
    rows, relative = judge_row_bounds(other, golden), judge_relative_budget(other, golden)
    assert rows
    assert relative
    assert relative.errors is not None
    assert 0 < relative.errors.relative_l2 < 0.01
    assert 0.9999 < relative.errors.cosine < 1


@pytest.mark.parametrize("row", [0, 17, ROWS - 1], ids=["tiny", "middle", "last"])
def test_one_bad_row_among_4096_cannot_be_diluted(expected: Tensor, row: int) -> None:
    other = scaled(expected, row, 1.03)
    rows, relative = judge_row_bounds(other, expected), judge_relative_budget(other, expected)
    assert rows.errors is not None
    assert relative.errors is not None
    assert relative.errors.relative_l2 < 0.01, "the overall budget alone would accept it"
    assert relative.errors.cosine > 0.9999, "and so would the cosine"
    for verdict in (rows, relative):
        assert not verdict
        assert verdict.errors is not None
        assert (verdict.errors.bad_rows, verdict.errors.worst_row) == (1, row)
        assert verdict.errors.row_l2 == pytest.approx(0.03, abs=0.003)
        assert verdict.errors.first_index is not None
        assert verdict.errors.first_index[0] == row
    with pytest.raises(JudgementError, match=rf"hidden: .*1 of 4096 rows .*first at \[{row}, \d+\]"):
        assert_row_bounds(other, expected, "hidden")
    with pytest.raises(JudgementError, match=rf"hidden: .*1 of 4096 rows .*first at \[{row}, \d+\]"):
        assert_relative_budget(other, expected, "hidden")


def test_the_peak_bound_sees_one_element(expected: Tensor) -> None:
    """One element off by 7 % of the RMS moves the row's RMS error to 0.9 % of it: only the peak bound is broken."""
    row = 2000
    other = expected.clone()
    other[row, 5] = (other[row, 5].float() + 0.07 * expected[row].float().square().mean().sqrt()).bfloat16()
    assert judge_relative_budget(other, expected)
    assert judge_row_bounds(other, expected, bounds=RowBounds(peak_ratio=0.1))
    verdict = judge_row_bounds(other, expected)
    assert verdict.errors is not None
    assert verdict.errors.first_index == (row, 5)
    assert "1 of 4096 rows are beyond a bound (0 in RMS, 1 in peak)" in verdict.reasons[0]


def test_the_relative_budget_counts_all_rows_together(expected: Tensor) -> None:
    """Every row off by 1.5 % is within the budget of a row, but not all together; a tilt shows in the cosine."""
    all_rows = judge_relative_budget((expected.float() * 1.015), expected.float())
    assert all_rows.errors is not None
    assert all_rows.errors.bad_rows == 0
    assert [reason.split(" is ")[0] for reason in all_rows.reasons] == ["relative L2"]
    tilted = expected.float() + 0.019 * expected.float().roll(1, 1)
    cosine = judge_relative_budget(tilted, expected.float(), budget=RelativeBudget(l2=0.1, row_l2=0.1, cosine=0.9999))
    assert [reason.split(" is ")[0] for reason in cosine.reasons] == ["cosine"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["actual", "expected", "both"])
def test_nothing_that_is_not_finite_passes(expected: Tensor, value: float, side: str) -> None:
    actual, reference = expected.clone(), expected.clone()
    for tensor in {"actual": [actual], "expected": [reference], "both": [actual, reference]}[side]:
        tensor[7, 3] = value
    generous = RowBounds(1e30, 1e30, 1e30, 1e30), RelativeBudget(1e30, 1e30, 0.0)
    for verdict in (
        judge_row_bounds(actual, reference),
        judge_relative_budget(actual, reference),
        judge_row_bounds(actual, reference, bounds=generous[0]),
        judge_relative_budget(actual, reference, budget=generous[1]),
    ):
        assert not verdict
        assert verdict.errors is not None
        assert (verdict.errors.non_finite, verdict.errors.first_index) == (1, (7, 3))
        assert verdict.reasons[0] == "1 elements are not finite"


def test_rows_near_zero_have_a_floor_and_rows_of_zeros_an_exact_one() -> None:
    reference = torch.zeros(3, WIDTH)
    assert judge_row_bounds(reference + 9e-7, reference)
    assert not judge_row_bounds(reference + 1.1e-6, reference)
    peak = reference.clone()
    peak[1, 2] = 9e-6
    assert not judge_row_bounds(peak, reference), "RMS"
    peak[1, 2] = 7e-6
    assert judge_row_bounds(peak, reference)
    assert judge_relative_budget(reference, reference)
    assert not judge_relative_budget(reference + 1e-30, reference)
    assert not judge_relative_budget(reference, reference + 1e-30)


def test_rows_swapped(expected: Tensor) -> None:
    other = expected.clone()
    other[[100, 101]] = expected[[101, 100]]
    for verdict in (judge_row_bounds(other, expected), judge_relative_budget(other, expected)):
        assert verdict.errors is not None
        assert verdict.errors.bad_rows == 2
        assert verdict.errors.first_index is not None
        assert verdict.errors.first_index[0] == 100


def test_only_active_rows_count(expected: Tensor) -> None:
    poisoned = expected.clone()
    poisoned[3000:] = math.nan
    mask = torch.arange(ROWS) < 3000
    for active in (3000, mask):
        rows = judge_row_bounds(poisoned, expected, active)
        assert rows
        assert rows.errors is not None
        assert rows.errors.rows == 3000
        assert judge_relative_budget(poisoned, expected, active)
        bad = scaled(poisoned, 2999, 1.5)
        assert not judge_row_bounds(bad, expected, active)
        assert not judge_relative_budget(bad, expected, active)
    assert not judge_row_bounds(poisoned, expected, 3001)
    nothing = judge_row_bounds(poisoned, expected, 0)
    assert nothing
    assert nothing.errors is not None
    assert (nothing.errors.rows, nothing.errors.worst_row) == (0, None)


def test_it_does_not_matter_how_many_rows_are_converted_at_once(
    expected: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = scaled(scaled(expected, 7, 1.03), 4000, math.nan)
    whole = judge_row_bounds(other, expected).errors, judge_relative_budget(other[:4000], expected[:4000]).errors
    for elements in (1, 5 * WIDTH, 4095 * WIDTH):
        monkeypatch.setattr(row_errors, "_ELEMENTS_AT_ONCE", elements)
        parts = judge_row_bounds(other, expected).errors, judge_relative_budget(other[:4000], expected[:4000]).errors
        assert repr(parts) == repr(whole), "repr, since a NaN does not equal itself"


def test_bounds_of_zero_demand_equality(expected: Tensor) -> None:
    none, budget = RowBounds(0.0, 0.0, 0.0, 0.0), RelativeBudget(0.0, 0.0, 1.0)
    assert judge_row_bounds(expected, expected, bounds=none)
    other = expected.clone()
    other[9, 9] *= 1.01
    assert not judge_row_bounds(other, expected, bounds=none)
    small = expected[:1].float()
    assert judge_relative_budget(small, small, budget=RelativeBudget(0.0, 0.0, 0.9999))
    assert not judge_relative_budget(other, expected, budget=budget)


def test_a_row_is_a_token_with_all_its_streams() -> None:
    reference = torch.ones(5, 4, 8)
    other = reference.clone()
    other[3, 2, 6] = 3.0
    verdict = judge_row_bounds(other, reference)
    assert verdict.errors is not None
    assert verdict.errors.first_index == (3, 2, 6)
    assert verdict.errors.rows == 5


def test_another_shape_or_dtype_is_rejected(expected: Tensor) -> None:
    for other in (expected[:-1], expected.float(), expected.T):
        assert "expected torch.bfloat16 [4096, 64], found torch." in judge_row_bounds(other, expected).reasons[0]
        assert "expected torch.bfloat16 [4096, 64], found torch." in judge_relative_budget(other, expected).reasons[0]


def test_operands_that_cannot_be_judged_are_a_typed_error(expected: Tensor) -> None:
    for reference, active in (
        (expected.int(), None),
        (expected.flatten(), None),
        (expected[:, :0], None),
        (expected, ROWS + 1),
        (expected, -1),
        (expected, torch.ones(ROWS)),
        (expected, torch.ones(ROWS - 1, dtype=torch.bool)),
    ):
        with pytest.raises(OperandError):
            judge_row_bounds(reference, reference, active)
        with pytest.raises(OperandError):
            judge_relative_budget(reference, reference, active)
    for bounds in ({"rms_ratio": -1.0}, {"peak_floor": math.inf}, {"rms_floor": math.nan}):
        with pytest.raises(OperandError, match=next(iter(bounds))):
            RowBounds(**bounds)
    for budget in ({"l2": -1.0}, {"row_l2": math.nan}, {"cosine": 1.1}):
        with pytest.raises(OperandError, match=next(iter(budget))):
            RelativeBudget(**budget)
