"""Experts: the clamps, where the route weight stands, and grouping that changes nothing."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from v41_config import FLASH, TINY, ModelConfig
from v41_goldens import exact
from v41_goldens.errors import ExpertError, OperandError
from v41_goldens.experts import routed_experts, shared_expert, swiglu, token_experts
from v41_goldens.judges import assert_equal_bits, unequal_bits
from v41_goldens.linear import quantized_linear
from v41_goldens.quantized_weights import Fp4Weight, Fp8Weight
from v41_goldens.weights import ExpertWeights, ModelWeights, MoeWeights

LIMIT = 10.0


@pytest.fixture
def moe_weights(tiny_weights: ModelWeights) -> MoeWeights:
    return tiny_weights.layers[3].moe


def rows(seed: int, count: int, config: ModelConfig = TINY) -> Tensor:
    return torch.randn(count, config.hidden_size, generator=torch.Generator().manual_seed(seed)).bfloat16()


def one_expert(x: Tensor, weight: float | None, expert: ExpertWeights) -> Tensor:
    """One row after the other, straight from model.md section 14.2."""
    gate, up = quantized_linear(x, expert.w1).float(), quantized_linear(x, expert.w3).float()
    z = exact.silu(torch.minimum(gate, torch.tensor(LIMIT))) * up.clamp(-LIMIT, LIMIT)
    if weight is not None:
        z = torch.tensor(weight) * z
    return quantized_linear(z.bfloat16(), expert.w2)


def test_swiglu_clamps_the_gate_above_and_up_on_both_sides() -> None:
    gate = torch.tensor([20.0, 10.0, -20.0, 1.0, 1.0])
    up = torch.tensor([1.0, 1.0, 1.0, 20.0, -20.0])
    silu = exact.silu(torch.tensor([10.0, 10.0, -20.0, 1.0, 1.0]))
    expected = silu * torch.tensor([1.0, 1.0, 1.0, 10.0, -10.0])
    assert_equal_bits(swiglu(gate, up, LIMIT), expected, "z")
    assert swiglu(gate.bfloat16(), up.bfloat16(), LIMIT).dtype == torch.float32
    weight = torch.tensor([0.3])
    assert_equal_bits(swiglu(gate, up, LIMIT, weight), expected * weight, "weighted z")
    assert swiglu(torch.tensor([math.nan]), torch.tensor([1.0]), LIMIT).isnan().all()
    assert swiglu(torch.tensor([1.0]), torch.tensor([math.nan]), LIMIT).isnan().all()


def test_shared_expert_row_by_row(moe_weights: MoeWeights) -> None:
    x = rows(0, 7)
    result = shared_expert(x, moe_weights.shared, TINY)
    for r in range(7):
        assert_equal_bits(result[r : r + 1], one_expert(x[r : r + 1], None, moe_weights.shared), f"row {r}")


def test_tokens_with_k_experts_are_k_routed_rows(moe_weights: MoeWeights) -> None:
    """Tokens and places without an expert too, and no token at all; a count of ids that is another is refused."""
    x, k = rows(11, 7), TINY.num_experts_per_tok
    generator = torch.Generator().manual_seed(12)
    ids = torch.randint(-2, TINY.n_routed_experts, (7, k), generator=generator)
    ids[2], x[2] = -1, math.nan
    weights = torch.rand(7, k, generator=generator)
    found = token_experts(x, ids, weights, moe_weights.experts, TINY)
    expected = routed_experts(x.repeat_interleave(k, 0), ids.flatten(), weights.flatten(), moe_weights.experts, TINY)
    assert_equal_bits(found, expected.view(7, k, -1), "rows")
    assert found[ids >= 0].any(-1).all()
    assert not found[ids < 0].any()
    assert token_experts(x[:0], ids[:0], weights[:0], {}, TINY).shape == (0, k, TINY.hidden_size)
    for wrong in ((x[:6], ids, weights), (x, ids, weights[:, :2]), (x, ids[0], weights[0])):
        with pytest.raises(OperandError, match="token_experts x, expert_ids, route_weights"):
            token_experts(*wrong, moe_weights.experts, TINY)


@pytest.mark.parametrize("shape", [(), (7,), (7, 3, TINY.hidden_size), (7, 1, TINY.hidden_size)])
def test_tokens_that_are_no_matrix_are_refused(shape: tuple[int, ...]) -> None:
    """Without an active place nothing is multiplied that could fail: the result would have another width."""
    x, ids = torch.zeros(shape, dtype=torch.bfloat16), torch.full((7, 2), -1)
    with pytest.raises(OperandError, match=r"token_experts x.*expected \[T, D\]"):
        token_experts(x, ids, torch.ones(7, 2), {}, TINY)


def test_routed_experts_row_by_row(moe_weights: MoeWeights) -> None:
    x = rows(1, 23)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, TINY.n_routed_experts, (23,), generator=generator, dtype=torch.int32)
    weights = torch.rand(23, generator=generator)
    result = routed_experts(x, ids, weights, moe_weights.experts, TINY)
    assert result.dtype == torch.bfloat16
    for r in range(23):
        expected = one_expert(x[r : r + 1], weights[r].item(), moe_weights.experts[int(ids[r])])
        assert_equal_bits(result[r : r + 1], expected, f"row {r}")
    # In another order and without some of the rows: the same rows come back.
    order = torch.randperm(23, generator=generator)[:11]
    part = routed_experts(x[order], ids[order].long(), weights[order], moe_weights.experts, TINY)
    assert_equal_bits(part, result[order], "permuted")


def test_the_limit_comes_from_the_config(moe_weights: MoeWeights) -> None:
    x, ids, ones = rows(3, 4) * 20, torch.zeros(4, dtype=torch.int32), torch.ones(4)
    other = TINY.model_copy(update={"swiglu_limit": 0.5})
    for limit_config in (TINY, other):
        result = routed_experts(x, ids, ones, moe_weights.experts, limit_config)
        assert unequal_bits(result, shared_expert(x, moe_weights.shared, limit_config)).any()
    assert unequal_bits(
        routed_experts(x, ids, ones, moe_weights.experts, other),
        routed_experts(x, ids, ones, moe_weights.experts, TINY),
    ).any()
    assert unequal_bits(shared_expert(x, moe_weights.shared, other), shared_expert(x, moe_weights.shared, TINY)).any()


def test_the_route_weight_comes_before_w2(moe_weights: MoeWeights) -> None:
    x, ids = rows(4, 8), torch.zeros(8, dtype=torch.int32)
    weights = torch.rand(8, generator=torch.Generator().manual_seed(5))
    before = routed_experts(x, ids, weights, moe_weights.experts, TINY)
    unweighted = routed_experts(x, ids, torch.ones(8), moe_weights.experts, TINY)
    assert unequal_bits((unweighted.float() * weights.unsqueeze(1)).bfloat16(), before).any()


def test_inactive_rows_are_zero_and_need_no_expert(moe_weights: MoeWeights) -> None:
    x = rows(6, 6)
    x[[0, 3]] = math.nan
    ids = torch.tensor([-1, 5, 5, -3, 2, 5], dtype=torch.int32)
    weights = torch.full((6,), 0.5)
    result = routed_experts(x, ids, weights, {2: moe_weights.experts[2], 5: moe_weights.experts[5]}, TINY)
    assert not result[[0, 3]].any()
    active = torch.tensor([1, 2, 4, 5])
    alone = routed_experts(x[active], ids[active], weights[active], moe_weights.experts, TINY)
    assert_equal_bits(result[active], alone, "active rows")
    assert not routed_experts(x, torch.full((6,), -1), weights, {}, TINY).any()
    assert routed_experts(x[:0], ids[:0], weights[:0], {}, TINY).shape == (0, TINY.hidden_size)


def test_all_rows_may_go_to_one_expert(moe_weights: MoeWeights) -> None:
    x, ids = rows(7, 9), torch.full((9,), 15, dtype=torch.int32)
    result = routed_experts(x, ids, torch.ones(9), {15: moe_weights.experts[15]}, TINY)
    for r in range(9):
        assert_equal_bits(result[r : r + 1], one_expert(x[r : r + 1], 1.0, moe_weights.experts[15]), f"row {r}")


def test_a_row_for_an_absent_expert_is_refused(moe_weights: MoeWeights) -> None:
    ids = torch.tensor([1, 4], dtype=torch.int32)
    with pytest.raises(ExpertError, match="1 experts held here, found 4"):
        routed_experts(rows(8, 2), ids, torch.ones(2), {1: moe_weights.experts[1]}, TINY)


def test_swapped_matrices_would_be_noticed(moe_weights: MoeWeights) -> None:
    expert = moe_weights.experts[0]
    swapped = dataclasses.replace(expert, w1=expert.w3, w3=expert.w1)
    x, ids, ones = rows(9, 3), torch.zeros(3, dtype=torch.int32), torch.ones(3)
    results = [routed_experts(x, ids, ones, {0: e}, TINY) for e in (expert, swapped)]
    assert unequal_bits(*results).any()


def random_expert(seed: int, config: ModelConfig, fp4: bool) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed)
    d, i = config.hidden_size, config.moe_intermediate_size

    def matrix(n: int, k: int) -> Fp8Weight | Fp4Weight:
        if fp4:
            packed = torch.randint(-128, 128, (n, k // 2), generator=generator, dtype=torch.int8)
            return Fp4Weight(packed, torch.full((n, k // 32), 119, dtype=torch.uint8).view(torch.float8_e8m0fnu))
        codes = torch.randn(n, k, generator=generator).to(torch.float8_e4m3fn)
        return Fp8Weight(codes, torch.full((n // 32, k // 32), 121, dtype=torch.uint8).view(torch.float8_e8m0fnu))

    return ExpertWeights(w1=matrix(i, d), w2=matrix(d, i), w3=matrix(i, d))


def test_flash_dimensions() -> None:
    x = rows(10, 5, FLASH)
    routed = {383: random_expert(11, FLASH, fp4=True)}
    shared = random_expert(12, FLASH, fp4=False)
    ids, weights = torch.tensor([383, -1, 383, 383, 383]), torch.full((5,), 0.4)
    many = routed_experts(x, ids, weights, routed, FLASH)
    one = routed_experts(x[2:3], ids[2:3], weights[2:3], routed, FLASH)
    assert_equal_bits(one, many[2:3], "routed row")
    assert_equal_bits(shared_expert(x[2:3], shared, FLASH), shared_expert(x, shared, FLASH)[2:3], "shared row")
    assert many.float().abs().max() > 0.1
