"""Exact arithmetic: one rounding, independence of order and batch, functions against correctly rounded references."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from v41_goldens import exact
from v41_goldens.judges import assert_equal_bits, unequal_bits


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rational_dot(x: Tensor, w: Tensor) -> Tensor:
    """Exact dot products of two matrices, rounded to float64 (correctly, by `float`), then to FP32."""
    rows = [[Fraction(value) for value in row] for row in x.double().tolist()]
    columns = [[Fraction(value) for value in row] for row in w.double().tolist()]
    dots = [[float(sum(a * b for a, b in zip(r, c, strict=True))) for c in columns] for r in rows]
    return torch.tensor(dots, dtype=torch.float64).float()


def test_dot_is_the_exact_sum_rounded_once() -> None:
    x, w = randn(0, 5, 96).bfloat16(), randn(1, 7, 96).bfloat16()
    assert_equal_bits(exact.dot(x, w), rational_dot(x, w), "dot")


def test_dot_keeps_what_fp32_would_lose() -> None:
    x = torch.tensor([[2.0**24, 1.0, -(2.0**24)]])
    assert exact.dot(x, torch.ones(1, 3)).item() == 1.0
    assert exact.dot_fp32(x, torch.ones(1, 3)).item() == 1.0


def test_dot_of_batches() -> None:
    x, w = randn(2, 2, 3, 4, 32), randn(3, 2, 3, 5, 32)
    whole = exact.dot(x, w)
    assert whole.shape == (2, 3, 4, 5)
    for i in range(2):
        for j in range(3):
            assert_equal_bits(whole[i, j], exact.dot(x[i, j], w[i, j]), f"batch {i}, {j}")
    assert_equal_bits(exact.dot(x, w[0, 0])[1, 2], exact.dot(x[1, 2], w[0, 0]), "one matrix for all")


@pytest.mark.parametrize("n", [1, 31, 32, 33, 64, 100])
def test_weights_are_converted_a_few_rows_at_a_time(n: int) -> None:
    """Wide rows are cut into chunks of 32, which changes nothing and keeps float64 copies small."""
    k = 1 << 14
    x, w = randn(4, 3, k).bfloat16(), randn(5, n, k).bfloat16()
    asked: list[tuple[int, int]] = []

    def rows(start: int, stop: int) -> Tensor:
        asked.append((start, stop))
        return w[start:stop]

    assert_equal_bits(exact.dot_by_rows(x, n, rows), torch.matmul(x.double(), w.double().T).float(), "chunks")
    assert asked == [(start, min(start + 32, n)) for start in range(0, n, 32)]


def test_dot_does_not_depend_on_the_batch_or_on_threads() -> None:
    x, w = randn(6, 70, 5120).bfloat16(), randn(7, 65, 5120).bfloat16()
    whole = exact.dot(x, w)
    for start, stop in ((0, 1), (1, 2), (5, 22), (22, 70)):
        assert_equal_bits(exact.dot(x[start:stop], w), whole[start:stop], f"rows {start} to {stop}")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert_equal_bits(exact.dot(x, w), whole, "one thread")
    finally:
        torch.set_num_threads(threads)


def test_dot_of_nothing_and_of_zeros() -> None:
    assert exact.dot(torch.empty(0, 32), torch.ones(8, 32)).shape == (0, 8)
    assert exact.dot_fp32(torch.empty(0, 32), torch.ones(8, 32)).shape == (0, 8)
    zero = exact.dot(torch.zeros(2, 32), -torch.ones(3, 32))
    assert_equal_bits(zero, torch.zeros(2, 3), "never -0")
    assert_equal_bits(exact.dot_fp32(torch.zeros(2, 32), -torch.ones(3, 32)), torch.zeros(2, 3), "never -0")


def test_dot_keeps_nan_and_infinity_in_their_row() -> None:
    x, w = randn(8, 4, 64), randn(9, 6, 64).abs()
    clean = exact.dot(x, w)
    x[1, 5], x[2, 7] = math.nan, math.inf
    for dot in (exact.dot, exact.dot_fp32):
        result = dot(x, w)
        assert result[1].isnan().all()
        assert not result[2].isfinite().any()
        assert_equal_bits(result[[0, 3]], clean[[0, 3]], "other rows")


def float64_of(dot: Callable[[Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """The same function without its last rounding."""

    def unrounded(x: Tensor, w: Tensor) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(exact, "_round", lambda value: value)
            return dot(x, w)

    return unrounded


def test_dot_fp32_does_not_depend_on_order_even_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full FP32 weights leave a plain float64 sum at the mercy of its order; the split sum is correctly rounded."""
    k = 20480  # HC * D of the release
    x, w = randn(10, 9, k).bfloat16(), randn(11, 24, k) / k**0.5
    order = torch.randperm(k, generator=torch.Generator().manual_seed(12))
    plain, split = (float64_of(dot, monkeypatch) for dot in (exact.dot, exact.dot_fp32))
    assert unequal_bits(plain(x[:, order], w[:, order]), plain(x, w)).any()
    result = split(x, w)
    assert_equal_bits(split(x[:, order], w[:, order]), result, "permuted")
    for start, stop in ((0, 1), (1, 3), (3, 9)):
        assert_equal_bits(split(x[start:stop], w), result[start:stop], "batch")
    exactly = sum(
        Fraction(a) * Fraction(b) for a, b in zip(x[0].double().tolist(), w[0].double().tolist(), strict=True)
    )
    assert result[0, 0].item() == float(exactly)


def test_dot_fp32_cuts_long_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = randn(13, 10, 64).bfloat16(), randn(14, 24, 64)
    whole = exact.dot_fp32(x, w)
    assert_equal_bits(whole, rational_dot(x, w), "rationals")
    monkeypatch.setattr(exact, "_SPLIT_ELEMENTS", 3 * 64)
    assert_equal_bits(exact.dot_fp32(x, w), whole, "three rows at a time")


def test_total_and_mean_round_once() -> None:
    half_ulp = 2.0**-24
    x = torch.tensor([[1.0, half_ulp, half_ulp / 2], [1.0, half_ulp, half_ulp]])
    assert exact.total(x, 1).tolist() == [1.0 + 2 * half_ulp, 1.0 + 2 * half_ulp]  # FP32 steps would give 1 for both
    assert exact.mean(torch.tensor([[1.0, 2.0, 2.0]]), 1).item() == np.float32(5 / 3)
    assert exact.total(x, 0, keepdim=True).shape == (1, 3)
    assert exact.mean(x, -1, keepdim=True).shape == (2, 1)


def test_total_is_never_minus_zero() -> None:
    negative = torch.tensor([[-0.0, -0.0], [-1e-45, 0.0]])
    assert_equal_bits(exact.total(negative, 1), torch.tensor([0.0, -1e-45]), "sum")
    assert_equal_bits(exact.mean(negative[:1], 1), torch.zeros(1), "mean")
    assert_equal_bits(exact.total(torch.full((1, 1), -0.0), 1), torch.zeros(1), "one term")


def in_decimal(function: Callable[[Decimal], Decimal]) -> Callable[[float], float]:
    """A reference with 60 digits, so that the conversion to float64 below is the only rounding."""

    def evaluate(x: float) -> float:
        with localcontext() as context:
            context.prec, context.Emin, context.Emax = 60, -(10**6), 10**6
            return float(function(Decimal(x)))

    return evaluate


REFERENCES: list[tuple[Callable[[Tensor], Tensor], Callable[[float], float], float, float]] = [
    (exact.exp, in_decimal(lambda x: x.exp()), -110.0, 88.0),
    (exact.sigmoid, in_decimal(lambda x: 1 / (1 + (-x).exp())), -110.0, 110.0),
    (exact.softplus, in_decimal(lambda x: (1 + x.exp()).ln() if x > -40 else x.exp()), -110.0, 110.0),
    (exact.silu, in_decimal(lambda x: x / (1 + (-x).exp())), -110.0, 110.0),
    (exact.sqrt, in_decimal(lambda x: x.sqrt()), 0.0, 3e38),
    (exact.rsqrt, in_decimal(lambda x: 1 / x.sqrt()), 2.0**-126, 3e38),
    (exact.cos, math.cos, -1e6, 1e6),
    (exact.sin, math.sin, -1e6, 1e6),
]


@pytest.mark.parametrize(("function", "reference", "low", "high"), REFERENCES, ids=lambda v: getattr(v, "__name__", ""))
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_functions_are_rounded_once(
    function: Callable[[Tensor], Tensor],
    reference: Callable[[float], float],
    low: float,
    high: float,
    data: st.DataObject,
) -> None:
    width32 = (float(np.float32(low)), float(np.float32(high)))
    x = data.draw(st.floats(*width32, width=32))
    result = function(torch.tensor([x]))
    assert result.dtype == torch.float32
    assert_equal_bits(result, torch.tensor([reference(x)], dtype=torch.float64).float(), f"at {x!r}")


def test_functions_at_their_limits() -> None:
    inf = math.inf
    assert exact.softplus(torch.tensor([-inf, 90.0, inf])).tolist() == [0.0, 90.0, inf]
    assert exact.softplus(torch.tensor([-20.0])).item() > 0  # log(1 + exp(x)) in FP32 is 0 from -17 on
    assert exact.rsqrt(torch.tensor([1e-20])).item() == np.float32(1 / math.sqrt(np.float64(np.float32(1e-20))))
    assert exact.exp(torch.tensor([-inf, inf])).tolist() == [0.0, inf]
    for function, *_ in REFERENCES:
        assert function(torch.tensor([math.nan])).isnan().all()
        assert function(torch.empty(0)).shape == (0,)


def test_functions_warm_torch_up_first_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of a process must not be a multi-threaded one."""
    sizes: list[int] = []

    def recorded(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return torch.sqrt(x)

    monkeypatch.setattr(exact, "_FUNCTIONS", (recorded,))
    exact.warm_up.cache_clear()
    exact.sqrt(torch.ones(1 << 17))
    assert sizes == [1, 1]  # FP32 and float64
    exact.exp(torch.ones(1 << 17))
    assert sizes == [1, 1]
    exact.warm_up.cache_clear()
    monkeypatch.undo()
    exact.warm_up()
