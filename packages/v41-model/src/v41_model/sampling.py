"""Choosing the next token: greedy, or drawn from a temperature and top-p distribution with a seed of its own.

A draw depends on a request's logits, its seed and how many tokens it has drawn before, and on nothing else: the
random number is a counter-based one, and probabilities are computed in the exact arithmetic of the goldens, so that
company, order and batch size change no token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from v41_goldens import exact
from v41_goldens.greedy import greedy_tokens
from v41_model.errors import RequestError
from v41_model.integer_checks import as_integer
from v41_model.operators import Operators

__all__ = ["GREEDY", "Sampling", "choose_tokens"]


def _number(value: object) -> float:
    """NaN for what is no real number."""
    is_number = isinstance(value, (int, float, np.floating, np.integer)) and not isinstance(value, bool)
    try:
        return float(value) if is_number else math.nan  # type: ignore[arg-type]
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class Sampling:
    """How a request chooses. ``temperature`` 0 takes the largest logit, the lowest id where several are equal;
    otherwise logits are divided by it and a token is drawn from the smallest set of most likely ones whose
    probabilities reach ``top_p`` together. ``seed`` is the request's own, 0 to 2^64 - 1.

    Errors: :class:`RequestError` naming the number that is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        temperature, top_p, seed = _number(self.temperature), _number(self.top_p), as_integer(self.seed)
        if not 0 <= temperature < math.inf:
            raise RequestError("sampling temperature", self.temperature, "0 (greedy) or a finite number above it")
        if not 0 < top_p <= 1:
            raise RequestError("sampling top_p", self.top_p, "0 < top_p <= 1")
        if seed is None or not 0 <= seed < 1 << 64:
            raise RequestError("sampling seed", self.seed, "an integer from 0 to 2^64 - 1")

    @property
    def greedy(self) -> bool:
        """Whether the largest logit decides."""
        return self.temperature == 0

    def uniform(self, drawn: int) -> float:
        """The random number in [0, 1) of the token after ``drawn`` others."""
        raw = int(np.random.Philox(key=self.seed, counter=drawn).random_raw())
        return float((raw >> 11) * 2.0**-53)


GREEDY = Sampling()


def choose_tokens(
    logits: Tensor, choices: Sequence[tuple[Sampling, int]], operators: Operators | None = None
) -> list[int]:
    """A token id for each row of FP32 ``[R, V]``; ``choices`` has each row's sampling and how many it chose before.

    ``operators`` may have another greedy choice than the golden.

    Errors: :class:`v41_goldens.errors.OperandError` for a row with a NaN.
    """
    greedy = greedy_tokens if operators is None else operators.at(None).around(greedy_tokens)
    tokens = greedy(logits) if len(choices) else torch.zeros(0, dtype=torch.int64)
    drawing = [row for row, (sampling, _) in enumerate(choices) if not sampling.greedy]
    if drawing:
        chosen = [choices[row] for row in drawing]
        rows = torch.tensor(drawing, device=logits.device)
        tokens[rows] = _draw(
            logits[rows],
            temperature=_column([s.temperature for s, _ in chosen], logits),
            top_p=_column([s.top_p for s, _ in chosen], logits),
            uniform=_column([s.uniform(drawn) for s, drawn in chosen], logits),
        )
    result: list[int] = tokens.tolist()
    return result


def _draw(logits: Tensor, *, temperature: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """INT64 ``[R]``: by inversion of each row's cumulative distribution, likeliest first; the rest float64 ``[R, 1]``.

    Cumulative sums run along a row in its own order, so a row's bits do not depend on the others.
    """
    scaled = (logits.double() - logits.amax(dim=-1, keepdim=True).double()) / temperature
    weight, token = exact.exp(scaled.float()).double().sort(dim=-1, descending=True, stable=True)
    reached = weight.cumsum(dim=-1)
    kept = ((reached - weight) < top_p * reached[:, -1:]).sum(dim=-1, keepdim=True)
    target = uniform * reached.gather(1, kept - 1)
    place = torch.searchsorted(reached, target, right=True).minimum(kept - 1)
    return token.gather(1, place).squeeze(1)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(1)
