"""The router: scores, ties, bias and weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from v41_config import FLASH, TINY
from v41_goldens.errors import OperandError
from v41_goldens.gate import GateOutput, gate
from v41_goldens.judges import assert_equal_bits

E, K, D = TINY.n_routed_experts, TINY.num_experts_per_tok, TINY.hidden_size
F32 = np.float32


def route(logits: list[float], bias: Tensor | None = None) -> GateOutput:
    """Routes of one token with exactly these logits, one for each of TINY's experts."""
    x = torch.zeros(1, D, dtype=torch.bfloat16)
    x[0, 0] = 1
    weight = torch.zeros(E, D, dtype=torch.bfloat16)
    weight[:, 0] = torch.tensor(logits)
    return gate(x, weight, torch.zeros(E) if bias is None else bias, TINY)


def score(logit: float) -> np.float32:
    softplus = F32(math.log1p(math.exp(logit)))
    result: np.float32 = F32(math.sqrt(float(softplus)))
    return result


def test_scores_weights_and_order() -> None:
    logits = [float(v) for v in torch.linspace(-4, 4, E).bfloat16()]
    routes = route(logits)
    assert routes.ids.dtype == torch.int32
    assert routes.ids.tolist() == [list(range(E - 1, E - 1 - K, -1))]
    assert_equal_bits(routes.biased_scores, torch.tensor([[float(score(v)) for v in logits]]), "scores")
    selected = [score(v) for v in logits[: E - 1 - K : -1]]
    total = F32(math.fsum(float(s) for s in selected)) + F32(1e-20)
    expected = [float(s / total * F32(1.5)) for s in selected]
    assert_equal_bits(routes.weights, torch.tensor([expected]), "weights")


def test_equal_scores_take_the_lower_ids() -> None:
    assert route([0.5] * E).ids.tolist() == [[0, 1, 2, 3]]
    logits = [0.0] * E
    logits[9] = 1.0
    logits[2] = -1.0
    assert route(logits).ids.tolist() == [[9, 0, 1, 3]]


def test_bias_chooses_but_does_not_weigh() -> None:
    logits = [0.0] * E
    bias = torch.zeros(E)
    bias[[12, 5]] = torch.tensor([3.0, 2.0])
    bias[0] = -1
    routes = route(logits, bias)
    assert routes.ids.tolist() == [[12, 5, 1, 2]]
    assert routes.weights.unique().tolist() == [1.5 / K]
    assert routes.biased_scores[0, 12] - routes.biased_scores[0, 1] == 3


@pytest.mark.parametrize("logit", [-104.0, -90.0, -20.0, -17.0, 0.0, 17.0, 90.0])
def test_weights_sum_to_the_scaling_factor_or_are_zero(logit: float) -> None:
    """Far below zero a score is small but present (`log(1 + exp(x))` in FP32 would be 0 from -17 on); where FP32 has
    no number left the weights are zero, not NaN."""
    weights = route([logit] * E).weights
    scores = K * math.sqrt(math.log1p(math.exp(logit))) if logit > -103.5 else 0.0
    expected = TINY.routed_scaling_factor * scores / (scores + 1e-20)
    assert weights.sum().item() == pytest.approx(expected, rel=1e-6, abs=0)


@pytest.mark.parametrize("place", ["token", "weight", "bias"])
def test_a_nan_is_refused(place: str) -> None:
    x, weight, bias = torch.zeros(2, D, dtype=torch.bfloat16), torch.ones(E, D, dtype=torch.bfloat16), torch.zeros(E)
    gate(x, weight, bias, TINY)
    {"token": x[1:], "weight": weight[3:4], "bias": bias[3:4]}[place].fill_(math.nan)
    row = 1 if place == "token" else 0
    with pytest.raises(OperandError, match=rf"gate scores\[{row}\]: expected a number for every expert"):
        gate(x, weight, bias, TINY)


def test_flash_dimensions_and_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(33, FLASH.hidden_size, generator=generator).bfloat16()
    weight = (torch.randn(FLASH.n_routed_experts, FLASH.hidden_size, generator=generator) / 30).bfloat16()
    bias = torch.randn(FLASH.n_routed_experts, generator=generator) * 0.25
    whole = gate(x, weight, bias, FLASH)
    assert whole.ids.shape == whole.weights.shape == (33, FLASH.num_experts_per_tok)
    taken = whole.biased_scores.gather(1, whole.ids.long())
    assert (taken[:, :-1] >= taken[:, 1:]).all()
    assert (whole.biased_scores > taken[:, -1:]).sum(1).eq(FLASH.num_experts_per_tok - 1).all()
    for rows in (slice(0, 1), slice(1, 20), slice(20, 33)):
        for part, all_ in zip(gate(x[rows], weight, bias, FLASH), whole, strict=True):
            assert_equal_bits(part, all_[rows], f"{rows}")
    nothing = gate(x[:0], weight, bias, FLASH)
    assert nothing.ids.shape == (0, FLASH.num_experts_per_tok)
    assert nothing.biased_scores.shape == (0, FLASH.n_routed_experts)
