"""The MoE sublayer: order of the sum, inactive routes, and its parts put together."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from v41_config import TINY
from v41_goldens.errors import OperandError
from v41_goldens.experts import routed_experts, shared_expert
from v41_goldens.gate import gate
from v41_goldens.judges import assert_equal_bits
from v41_goldens.moe import combine, moe
from v41_goldens.weights import ModelWeights, MoeWeights


@pytest.fixture
def moe_weights(tiny_weights: ModelWeights) -> MoeWeights:
    return tiny_weights.layers[4].moe


def rows(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_experts_are_added_in_ascending_id_then_the_shared_one() -> None:
    """2^24 + 1 is no FP32 number, so the sum of 2^24, 1 and -2^24 is 0 or 1, depending on the order."""
    values = [2.0**24, 1.0, -(2.0**24)]
    shared = torch.full((1, 1), 0.5, dtype=torch.bfloat16)
    seen = set()
    for ids in itertools.permutations([1, 7, 12]):
        expert_rows = torch.tensor(values).bfloat16().view(1, 3, 1)
        result = combine(expert_rows, torch.tensor([ids], dtype=torch.int32), shared).item()
        expected = torch.zeros(())
        for value in [v for _, v in sorted(zip(ids, values, strict=True))] + [0.5]:
            expected = expected + value
        assert result == expected.item()
        seen.add(result)
    assert seen == {0.5, 1.5}
    last = combine(torch.tensor([1.0, -(2.0**24)]).bfloat16().view(1, 2, 1), torch.tensor([[0, 1]]), -shared * 2**25)
    assert last.item() == -(2.0**25)


def test_the_sum_is_rounded_once() -> None:
    """Rounding to BF16 after every expert would lose each of the small terms."""
    expert_rows = torch.tensor([256.0, 0.75, 0.75]).bfloat16().view(1, 3, 1)
    result = combine(expert_rows, torch.tensor([[0, 1, 2]]), torch.full((1, 1), 0.75).bfloat16())
    assert result.item() == 258.0


def test_zeros_sum_to_plus_zero() -> None:
    zero = torch.full((1, 2, 4), -0.0, dtype=torch.bfloat16)
    assert_equal_bits(combine(zero, torch.tensor([[0, 1]]), zero[:, 0]), torch.zeros(1, 4).bfloat16(), "+0")


def test_inactive_routes_are_left_out_whatever_their_rows_hold() -> None:
    expert_rows, shared = rows(0, 3, 4, 8), rows(1, 3, 8)
    ids = torch.tensor([[3, 1, 2, 0], [5, -1, -1, 4], [-1, -1, -1, -1]], dtype=torch.int32)
    expert_rows[ids < 0] = math.nan
    result = combine(expert_rows, ids, shared)
    two = combine(expert_rows[1:2, [0, 3]], ids[1:2, [0, 3]], shared[1:2])
    assert_equal_bits(result[1:2], two, "two routes")
    assert_equal_bits(result[2], shared[2], "shared alone")


def test_moe_is_its_parts_and_tokens_are_independent(moe_weights: MoeWeights) -> None:
    x = rows(2, 11, TINY.hidden_size)
    result = moe(x, moe_weights, TINY)
    routes = gate(x, moe_weights.gate, moe_weights.gate_bias, TINY)
    k = TINY.num_experts_per_tok
    by_slot = [
        routed_experts(x, routes.ids[:, s], routes.weights[:, s], moe_weights.experts, TINY) for s in range(k)
    ]  # one slot after the other: another grouping
    parts = combine(torch.stack(by_slot, dim=1), routes.ids, shared_expert(x, moe_weights.shared, TINY))
    assert_equal_bits(result, parts, "parts")
    for t in (0, 4, 10):
        assert_equal_bits(moe(x[t : t + 1], moe_weights, TINY), result[t : t + 1], f"token {t}")
    assert moe(x[:0], moe_weights, TINY).shape == (0, TINY.hidden_size)


def test_a_nan_token_cannot_be_routed(moe_weights: MoeWeights) -> None:
    x = rows(3, 4, TINY.hidden_size)
    x[2, 9] = math.nan
    with pytest.raises(OperandError, match=r"gate scores\[2\]"):
        moe(x, moe_weights, TINY)
