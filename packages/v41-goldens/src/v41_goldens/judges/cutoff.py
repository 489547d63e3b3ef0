"""The quality of a choice of the k best: nothing that was left out beats anything that was chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from v41_goldens.errors import OperandError


@dataclass(frozen=True)
class CutoffRule:
    """Which choices at the cutoff are right.

    Attributes:
        ties: of several equal scores, those of the lower indices (model.md section 3, E6), or any.
        slack: how far, in units of the score, something left out may exceed something chosen. For scores of another
            arithmetic, whose error the caller can bound; nothing decides ties by index then.
    """

    ties: Literal["lower index", "any"] = "lower index"
    slack: float = 0.0

    def __post_init__(self) -> None:
        if self.ties not in ("lower index", "any"):
            raise OperandError("CutoffRule.ties", self.ties, "'lower index' or 'any'")
        if not 0.0 <= self.slack < math.inf or (self.slack and self.ties != "any"):
            raise OperandError("CutoffRule.slack", self.slack, "0, or a positive number with ties='any'")

    def __str__(self) -> str:
        return f"no score left out more than {self.slack:g} above one chosen, of equal ones {self.ties} first"


BY_INDEX = CutoffRule()
"""The model's own rule: exact scores, ties to the lower index."""


class CutoffFaults(NamedTuple):
    """How a choice among `[T, n]` compares with the k best.

    Attributes:
        below: bool `[T, n]`, chosen although something better, beyond the slack, was left out.
        wrong_tie: bool `[T, n]`, chosen although an equal score of a lower index was left out; none with ties="any".
        missing: INT64 `[T]`, how many more could have been chosen.
        deficit: FP32 `[T]`, best score left out minus worst score chosen; -inf where either is none.
    """

    below: Tensor
    wrong_tie: Tensor
    missing: Tensor
    deficit: Tensor


def cutoff_faults(chosen: Tensor, reachable: Tensor, scores: Tensor, k: int, rule: CutoffRule) -> CutoffFaults:
    """Compare a choice with the `k` best of the reachable scores.

    Args:
        chosen, reachable: bool `[T, n]`; what is chosen but not reachable is not looked at.
        scores: `[T, n]`, any float dtype, not NaN where reachable.
        k: how many are chosen where there are enough.
    """
    values = scores.to(torch.float32)
    taken, left = chosen & reachable, reachable & ~chosen
    best_left = _amax(values.where(left, -math.inf))
    worst_taken = -_amax((-values).where(taken, -math.inf))
    below = taken & (values < (best_left - rule.slack).unsqueeze(1))
    wrong_tie = torch.zeros_like(taken)
    if rule.ties == "lower index":
        index, equal = torch.arange(values.shape[1], device=values.device), values == best_left.unsqueeze(1)
        lowest_left = index.where(left & equal, values.shape[1]).amin(1, keepdim=True) if len(index) else index
        wrong_tie = taken & equal & (index > lowest_left)
    return CutoffFaults(
        below=below,
        wrong_tie=wrong_tie,
        missing=(reachable.sum(1).clamp_max(k) - taken.sum(1)).clamp_min(0),
        deficit=(best_left - worst_taken).where(taken.any(1) & left.any(1), -math.inf),
    )


def _amax(values: Tensor) -> Tensor:
    return values.amax(1) if values.shape[1] else values.new_full((len(values),), -math.inf)
