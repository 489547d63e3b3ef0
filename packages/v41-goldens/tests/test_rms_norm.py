"""RMSNorm against a scalar reference that rounds where model.md section 6 says."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from v41_goldens.judges import assert_equal_bits, unequal_bits
from v41_goldens.rms_norm import inverse_rms, rms_norm

EPS = 1e-20
F32 = np.float32


def operands(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).mul_(3).bfloat16()
    return x, (torch.randn(shape[-1], generator=generator) * 0.15 + 1).bfloat16()


def scalar_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = []
    for row in x.tolist():
        squares = [Fraction(float(F32(v) * F32(v))) for v in row]
        mean = F32(float(sum(squares) / len(squares)))
        inverse = F32(1 / math.sqrt(np.float64(mean + F32(eps))))
        rows.append([float(F32(v) * inverse * F32(w)) for v, w in zip(row, weight.tolist(), strict=True)])
    return torch.tensor(rows).bfloat16()


def test_against_the_scalar_reference() -> None:
    for dim in (1, 32, 96, 1280):
        x, weight = operands(dim, 3, dim)
        assert_equal_bits(rms_norm(x, weight, EPS), scalar_reference(x, weight, EPS), f"D = {dim}")


def test_fp32_input() -> None:
    x, weight = operands(1, 3, 96)
    assert_equal_bits(rms_norm(x.float(), weight, EPS), rms_norm(x, weight, EPS), "FP32")


def test_there_is_one_rounding() -> None:
    """Rounding before the weight, as another port does, gives other numbers."""
    x, weight = operands(2, 8, 256)
    values = x.float()
    twice = ((values * inverse_rms(values, EPS)).bfloat16() * weight).bfloat16()
    assert unequal_bits(twice, rms_norm(x, weight, EPS)).any()


def test_the_mean_is_rounded_once() -> None:
    """Dividing an FP32 sum of squares by D rounds a second time."""
    x, _ = operands(3, 400, 5120)
    squares = x.float() ** 2
    once = (squares.double().sum(-1) / 5120).float()
    twice = squares.double().sum(-1).float() / 5120
    assert unequal_bits(twice, once).any()
    expected = torch.rsqrt((once + EPS).double()).float().unsqueeze(-1)
    assert_equal_bits(inverse_rms(x.float(), EPS), expected, "inverse RMS")


def test_small_rows_are_not_damped_by_eps() -> None:
    x, weight = operands(4, 2, 64)
    small = (x.float() * 2.0**-26).bfloat16()
    assert_equal_bits(rms_norm(small, weight, EPS), rms_norm(x, weight, EPS), "scaled by a power of two")
    assert unequal_bits(rms_norm(small, weight, 1e-6), rms_norm(x, weight, EPS)).any()


def test_zero_rows_huge_rows_and_nothing() -> None:
    x, weight = operands(5, 3, 64)
    x[0] = 0
    x[1] = 3e38  # squares overflow FP32: the norm of such a row is zero
    result = rms_norm(x, weight, EPS)
    assert not result[:2].any()
    assert_equal_bits(result[2:], rms_norm(x[2:], weight, EPS), "other rows")
    assert rms_norm(x[:0], weight, EPS).shape == (0, 64)
    assert rms_norm(x.view(3, 1, 64), weight, EPS).shape == (3, 1, 64)


def test_nan_stays_in_its_row() -> None:
    x, weight = operands(6, 4, 64)
    clean = rms_norm(x, weight, EPS)
    x[2, 5] = math.nan
    result = rms_norm(x, weight, EPS)
    assert result[2].isnan().all()
    assert_equal_bits(result[[0, 1, 3]], clean[[0, 1, 3]], "other rows")


def test_rows_do_not_depend_on_the_batch() -> None:
    x, weight = operands(7, 67, 5120)
    whole = rms_norm(x, weight, EPS)
    for start, stop in ((0, 1), (1, 3), (3, 67)):
        assert_equal_bits(rms_norm(x[start:stop], weight, EPS), whole[start:stop], f"rows {start} to {stop}")
