"""Hyper-connections against a scalar reference, and the properties that tell them from near misses."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from v41_config import FLASH, TINY, ModelConfig
from v41_goldens.hyper_connections import mhc_mixes, mhc_post, mhc_pre, mhc_split
from v41_goldens.judges import assert_equal_bits, unequal_bits
from v41_goldens.weights import HyperConnectionWeights

F32 = np.float32
HC = 4


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_weights(config: ModelConfig, seed: int) -> HyperConnectionWeights:
    return HyperConnectionWeights(
        fn=randn(seed, config.hc_mixes, config.hc_dim) * config.hc_dim**-0.5,
        base=randn(seed + 1, config.hc_mixes) * 0.5,
        scale=randn(seed + 2, 3).abs() + 0.5,
    )


def scalar_split(m: Tensor, scale: Tensor, base: Tensor, iterations: int) -> tuple[list[float], list[float], Tensor]:
    """One token, number by number, in FP32 with sums and functions in float64."""
    eps = F32(1e-6)
    part = [0] * HC + [1] * HC + [2] * HC * HC
    factors, bases = scale.float().tolist(), base.tolist()
    logits = [F32(F32(v) * F32(factors[p])) + F32(b) for v, p, b in zip(m.tolist(), part, bases, strict=True)]

    def sigmoid(x: np.float32) -> np.float32:
        result: np.float32 = F32(1 / (1 + math.exp(-float(x))))
        return result

    def total(values: list[np.float32]) -> np.float32:
        result: np.float32 = F32(math.fsum(float(value) for value in values))
        return result

    pre = [float(sigmoid(x) + eps) for x in logits[:HC]]
    post = [float(F32(2) * sigmoid(x)) for x in logits[HC : 2 * HC]]
    c = [[logits[2 * HC + HC * j + k] for k in range(HC)] for j in range(HC)]
    c = [[F32(math.exp(float(v - max(row)))) for v in row] for row in c]
    c = [[v / total(row) + eps for v in row] for row in c]
    for step in range(2 * iterations - 1):
        if step % 2 == 0:
            sums = [total([c[j][k] for j in range(HC)]) + eps for k in range(HC)]
            c = [[c[j][k] / sums[k] for k in range(HC)] for j in range(HC)]
        else:
            c = [[v / (total(row) + eps) for v in row] for row in c]
    return pre, post, torch.tensor([[float(v) for v in row] for row in c])


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_split_against_the_scalar_reference(iterations: int) -> None:
    config = TINY.model_copy(update={"hc_sinkhorn_iters": iterations})
    mixes = randn(0, 6, 24) * torch.tensor([0.0, 0.1, 1.0, 5.0, 30.0, 300.0]).unsqueeze(1)
    scale, base = torch.tensor([0.7, 1.1, 0.9]), randn(1, 24)
    pre, post, comb = mhc_split(mixes, scale, base, config)
    for t in range(6):
        expected_pre, expected_post, expected_comb = scalar_split(mixes[t], scale, base, iterations)
        assert_equal_bits(pre[t], torch.tensor(expected_pre), "pre")
        assert_equal_bits(post[t], torch.tensor(expected_post), "post")
        assert_equal_bits(comb[t], expected_comb, "comb")


def test_only_columns_are_tight() -> None:
    _, _, comb = mhc_split(randn(2, 50, 24) * 20, torch.ones(3), torch.zeros(24), TINY)
    assert (comb.sum(1) - 1).abs().max() < 2e-6
    assert (comb.sum(2) - 1).abs().max() > 1e-4


def test_mixes_project_first_and_scale_after() -> None:
    x, weights = randn(3, 5, HC, TINY.hidden_size).bfloat16(), random_weights(TINY, 4)
    flat = x.flatten(1).double()
    inverse = (1 / (flat.float().square().double().mean(1).float() + TINY.rms_norm_eps).double().sqrt()).float()
    projected = torch.tensor(
        [[float(sum(map(Fraction.__mul__, row, column))) for column in rational(weights.fn)] for row in rational(flat)],
        dtype=torch.float64,
    ).float()
    expected = mhc_split(projected * inverse.unsqueeze(1), weights.scale, weights.base, TINY)
    for ours, other in zip(mhc_mixes(x, weights, TINY), expected, strict=True):
        assert_equal_bits(ours, other, "mixes")


def rational(matrix: Tensor) -> list[list[Fraction]]:
    return [[Fraction(v) for v in row] for row in matrix.double().tolist()]


def test_mixes_see_every_stream_in_its_place() -> None:
    """Stream j is columns j*D to (j+1)*D of fn; another order of streams gives other coefficients."""
    x, weights = randn(5, 3, HC, TINY.hidden_size).bfloat16(), random_weights(TINY, 6)
    assert unequal_bits(mhc_mixes(x.flip(1), weights, TINY)[0], mhc_mixes(x, weights, TINY)[0]).any()
    d = TINY.hidden_size
    flipped = HyperConnectionWeights(
        fn=weights.fn.unflatten(1, (HC, d)).flip(1).flatten(1), base=weights.base, scale=weights.scale
    )
    assert_equal_bits(mhc_mixes(x.flip(1), flipped, TINY)[2], mhc_mixes(x, weights, TINY)[2], "both flipped")


def test_collapse_sums_exact_products_once() -> None:
    x, pre = randn(7, 9, HC, 33).bfloat16(), randn(8, 9, HC).abs()
    result = mhc_pre(x, pre)
    for t in range(9):
        for d in range(33):
            products = [F32(pre[t, j].item()) * F32(x[t, j, d].item()) for j in range(HC)]
            exactly = torch.tensor(math.fsum(float(p) for p in products), dtype=torch.float64)
            assert result[t, d] == exactly.float().bfloat16()


def test_collapse_with_one_hot_weights_is_the_stream() -> None:
    x = randn(9, 4, HC, 64).bfloat16()
    assert_equal_bits(mhc_pre(x, torch.tensor([[1.0, 0, 0, 0]]).expand(4, HC)), x[:, 0].contiguous(), "stream 0")


def test_expand_against_the_scalar_reference() -> None:
    y, x = randn(10, 3, 16).bfloat16(), randn(11, 3, HC, 16).bfloat16()
    post, comb = randn(12, 3, HC).abs(), randn(13, 3, HC, HC)
    result = mhc_post(y, x, post, comb)
    for t in range(3):
        for k in range(HC):
            for d in range(16):
                products = [F32(comb[t, j, k].item()) * F32(x[t, j, d].item()) for j in range(HC)]
                mixed = F32(math.fsum(float(p) for p in products))
                value = F32(post[t, k].item()) * F32(y[t, d].item()) + mixed
                assert result[t, k, d] == torch.tensor(float(value)).bfloat16()


def test_expand_carries_the_first_index_into_the_second() -> None:
    """One hot entry off the diagonal: comb[j, k] = 1 puts stream j into stream k, and nothing else anywhere."""
    x, y = randn(14, 1, HC, 8).bfloat16(), torch.zeros(1, 8, dtype=torch.bfloat16)
    comb = torch.zeros(1, HC, HC)
    comb[0, 3, 1] = 1
    result = mhc_post(y, x, torch.zeros(1, HC), comb)
    assert_equal_bits(result[0, 1], x[0, 3], "stream 3 in place 1")
    assert not result[0, [0, 2, 3]].any()


def test_expand_never_carries_minus_zero() -> None:
    x = torch.full((1, HC, 8), -0.0, dtype=torch.bfloat16)
    y = torch.full((1, 8), -0.0, dtype=torch.bfloat16)
    result = mhc_post(y, x, torch.ones(1, HC), torch.ones(1, HC, HC))
    assert_equal_bits(result, torch.zeros(1, HC, 8, dtype=torch.bfloat16), "+0")
    assert_equal_bits(mhc_pre(x, torch.ones(1, HC)), torch.zeros(1, 8, dtype=torch.bfloat16), "+0")


def test_at_flash_dimensions_rows_do_not_depend_on_the_batch() -> None:
    x, y = randn(15, 9, HC, FLASH.hidden_size).bfloat16(), randn(16, 9, FLASH.hidden_size).bfloat16()
    weights = random_weights(FLASH, 17)

    def block(rows: slice) -> tuple[Tensor, ...]:
        pre, post, comb = mhc_mixes(x[rows], weights, FLASH)
        return pre, post, comb, mhc_pre(x[rows], pre), mhc_post(y[rows], x[rows], post, comb)

    whole = block(slice(None))
    for rows in (slice(0, 1), slice(1, 3), slice(3, 9)):
        for part, all_ in zip(block(rows), whole, strict=True):
            assert_equal_bits(part, all_[rows].contiguous(), f"{rows}")
    assert all(part.shape[0] == 0 for part in block(slice(0, 0)))


def test_nan_stays_in_its_token() -> None:
    x, weights = randn(18, 3, HC, TINY.hidden_size).bfloat16(), random_weights(TINY, 19)
    clean = mhc_mixes(x, weights, TINY)
    x[1, 2, 7] = math.nan
    for part, before in zip(mhc_mixes(x, weights, TINY), clean, strict=True):
        assert part[1].isnan().all()
        assert_equal_bits(part[[0, 2]], before[[0, 2]], "other tokens")
