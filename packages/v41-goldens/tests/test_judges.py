"""The judge of every other test must see one bit and the sign of zero; and what all verdicts have in common."""

from __future__ import annotations

import pickle

import pytest
import torch

from v41_goldens.errors import GoldenError
from v41_goldens.judges import JudgementError, assert_equal_bits, judge_equal_bits, judge_row_bounds, unequal_bits

DTYPES = (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_of_every_element_counts(dtype: torch.dtype) -> None:
    expected = torch.arange(1, 7, dtype=torch.float32).view(2, 3).to(dtype)
    assert_equal_bits(expected.clone(), expected, "same")
    size = expected.element_size()
    for bit in (0, 8 * size - 1):
        other = expected.clone()
        raw = other.view(torch.uint8).view(2, 3, size)
        raw[1, 2, bit // 8] ^= 1 << bit % 8
        assert unequal_bits(other, expected).nonzero().tolist() == [[1, 2]]
        with pytest.raises(AssertionError, match=r"name: .* first at \[1, 2\]: .*; 1 of 6 elements differ"):
            assert_equal_bits(other, expected, "name")


def test_sign_of_zero_shape_and_dtype_count() -> None:
    zero = torch.zeros(2)
    with pytest.raises(AssertionError, match=r"expected 0.0 \(0x00000000\), found -0.0 \(0x80000000\); 2 of 2"):
        assert_equal_bits(-zero, zero, "zero")
    with pytest.raises(AssertionError, match=r"expected torch.float32 \[2\], found torch.float32 \[1, 2\]"):
        assert_equal_bits(zero.unsqueeze(0), zero, "zero")
    with pytest.raises(AssertionError, match=r"found torch\.int32"):
        assert_equal_bits(zero.int(), zero, "zero")


def test_equal_nan_and_empty() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert_equal_bits(nan.clone(), nan, "nan")
    assert_equal_bits(torch.empty(0, 4), torch.empty(0, 4), "empty")


def test_a_verdict_is_true_if_accepted_and_tells_its_statistics() -> None:
    expected = torch.ones(2, 3)
    same, other = judge_equal_bits(expected, expected), judge_equal_bits(expected * 2, expected)
    assert same
    assert same.accepted
    assert (same.unequal, same.elements, same.first_index, same.reasons) == (0, 6, None, ())
    assert repr(same) == "accepted; 0 of 6 elements differ"
    assert not other
    assert not other.accepted
    assert (other.unequal, other.elements, other.first_index) == (6, 6, (0, 0))
    assert repr(other) == ("first at [0, 0]: expected 1.0 (0x3f800000), found 2.0 (0x40000000); 6 of 6 elements differ")


def test_the_error_is_typed_holds_the_verdict_and_is_a_failed_assertion() -> None:
    verdict = judge_row_bounds(torch.zeros(2, 3), torch.ones(2, 3))
    with pytest.raises(JudgementError) as caught:
        verdict.require("layer 3 output")
    error = caught.value
    assert isinstance(error, GoldenError)
    assert isinstance(error, AssertionError)
    assert (error.where, error.found, error.expected) == ("layer 3 output", verdict, verdict.rule)
    assert str(error).startswith("layer 3 output: expected RMS(error) <= ")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301
    judge_row_bounds(torch.ones(2, 3), torch.ones(2, 3)).require("accepted")
