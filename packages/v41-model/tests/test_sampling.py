"""Drawing tokens: the right distribution, the same token in any company, and greedy where nothing is drawn."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from v41_config import ParallelLayout
from v41_goldens.errors import OperandError
from v41_loader import Checkpoint
from v41_model.errors import RequestError
from v41_model.generation import generate
from v41_model.sampling import GREEDY, Sampling, choose_tokens
from v41_model.session import ModelSession

LOGITS = torch.tensor([[1.0, 3.0, 2.0, 3.0, -torch.inf]])


def _draws(sampling: Sampling, count: int = 4000) -> dict[int, float]:
    """Shares of the tokens that a request with these logits draws one after another."""
    drawn = Counter(choose_tokens(LOGITS.expand(count, -1), [(sampling, number) for number in range(count)]))
    return {token: times / count for token, times in sorted(drawn.items())}


def test_greedy_takes_the_lowest_of_the_largest() -> None:
    assert choose_tokens(LOGITS, [(GREEDY, 0)]) == [1]
    assert choose_tokens(torch.zeros(0, 5), []) == []


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_shares_follow_the_temperature(temperature: float) -> None:
    expected = torch.softmax(LOGITS[0].double() / temperature, dim=0)
    shares = _draws(Sampling(temperature, seed=7))
    assert set(shares) <= {0, 1, 2, 3}, "a logit of -inf is never drawn"
    for token, share in shares.items():
        deviation = math.sqrt(float(expected[token] * (1 - expected[token])) / 4000)
        assert abs(share - float(expected[token])) < 4 * deviation, token


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-9, {1}), (0.39, {1}), (0.45, {1, 3}), (0.8, {1, 3, 2}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    """Probabilities are 0.40, 0.40, 0.15, 0.05; of equal ones the lower id comes first."""
    shares = _draws(Sampling(1.0, top_p))
    assert set(shares) == kept


def test_a_tiny_temperature_is_greedy() -> None:
    assert set(_draws(Sampling(1e-300), 100)) == {1, 3}, "two logits are equal"
    assert choose_tokens(torch.tensor([[0.0, 1.0, 1.0 - 1e-6]]), [(Sampling(1e-12), 0)]) == [1]


def test_a_row_does_not_depend_on_its_company() -> None:
    """The same row alone, in a batch with others and in another place draws the same tokens."""
    logits = torch.randn(16, 300, generator=torch.Generator().manual_seed(3)) * 4
    choices = [(Sampling(0.5 + row / 8, 0.9, seed=row), 3 * row) if row % 3 else (GREEDY, 0) for row in range(16)]
    together = choose_tokens(logits, choices)
    assert together == [choose_tokens(logits[row : row + 1], [choices[row]])[0] for row in range(16)]
    assert together[::-1] == choose_tokens(logits.flip(0), choices[::-1])


def test_seeds_and_counts_make_other_numbers() -> None:
    numbers = {Sampling(1.0, seed=seed).uniform(drawn) for seed in range(20) for drawn in range(20)}
    assert len(numbers) == 400
    assert all(0 <= number < 1 for number in numbers)
    assert Sampling(1.0, seed=5).uniform(9) == Sampling(1.0, seed=5).uniform(9)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 64}, "seed"),
        ({"seed": 1.0}, "seed"),
    ],
)
def test_numbers_out_of_range(options: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestError, match=f"sampling {name}"):
        Sampling(**options)


def test_nan_is_refused() -> None:
    with pytest.raises(OperandError, match="NaN"):
        choose_tokens(torch.tensor([[1.0, torch.nan]]), [(Sampling(1.0), 0)])


def test_sampled_requests_in_a_model_do_not_depend_on_company_or_layout(tiny_checkpoint: Checkpoint) -> None:
    prompts = [[3, 4, 5], [3, 4, 5], [7]]
    how = Sampling(1.5, 0.95, seed=11)
    together = generate(ModelSession.open(tiny_checkpoint, ParallelLayout(2, 2)), prompts, 4, sampling=how)
    assert together[0] != together[1], "equal prompts have seeds of their own"
    single = ModelSession.open(tiny_checkpoint, ParallelLayout(1, 1))
    for index, prompt in enumerate(prompts):
        own = Sampling(1.5, 0.95, seed=11 + index)
        assert generate(single, [prompt], 4, sampling=own, max_step_rows=2)[0] == together[index]
    with pytest.raises(RequestError, match=r"one for each of 3 prompts, found 1 of them"):
        generate(single, prompts, 1, sampling=[how])
    with pytest.raises(RequestError, match=r"sampling\[1\]: expected a Sampling, found 5"):
        generate(single, prompts, 1, sampling=[how, 5, how])  # type: ignore[list-item]
