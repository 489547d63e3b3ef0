"""The judge of every other test: it must see one bit, and the sign of zero."""

from __future__ import annotations

import pytest
import torch

from v41_goldens.judges import assert_equal_bits, unequal_bits

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
        with pytest.raises(AssertionError, match=r"name: 1 of 6 elements differ, first \[1, 2\]"):
            assert_equal_bits(other, expected, "name")


def test_sign_of_zero_shape_and_dtype_count() -> None:
    zero = torch.zeros(2)
    with pytest.raises(AssertionError, match="2 of 2"):
        assert_equal_bits(-zero, zero, "zero")
    with pytest.raises(AssertionError, match=r"expected torch.float32 \[2\], found torch.float32 \[1, 2\]"):
        assert_equal_bits(zero.unsqueeze(0), zero, "zero")
    with pytest.raises(AssertionError, match=r"found torch\.int32"):
        assert_equal_bits(zero.int(), zero, "zero")


def test_equal_nan_and_empty() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert_equal_bits(nan.clone(), nan, "nan")
    assert_equal_bits(torch.empty(0, 4), torch.empty(0, 4), "empty")
