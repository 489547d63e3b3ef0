"""Whole runs beside the goldens: what the comparison of logits accepts, and what it must refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from v41_config import ParallelLayout
from v41_goldens.errors import OperandError
from v41_goldens.moe import combine
from v41_goldens.rms_norm import rms_norm
from v41_loader import Checkpoint
from v41_model.forward_file import forward_tensors
from v41_model.logit_comparison import LogitBounds, compare_with_goldens, judge_logits
from v41_model.operators import Operators
from v41_model.session import ModelSession

PROMPTS = [[5], [0, 17], list(range(3, 16))]


def logits(rows: int = 9) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(7))


def turned(rows: Tensor, cosine: float) -> Tensor:
    """Rows of the same length at that cosine."""
    other = torch.randn(rows.shape, generator=torch.Generator().manual_seed(8))
    other = other - rows * (other * rows).sum(-1, keepdim=True) / rows.square().sum(-1, keepdim=True)
    other = other * rows.norm(dim=-1, keepdim=True) / other.norm(dim=-1, keepdim=True)
    mixed: Tensor = rows * cosine + other * math.sqrt(1 - cosine**2)
    return mixed


def test_cosines_and_tokens_are_told() -> None:
    expected = logits()
    actual = expected.clone()
    actual[4] = turned(expected, 0.981)[4]
    actual[2, int(expected[2].argmax())] = expected[2].sort().values[-2] - 1e-3
    verdict = judge_logits(actual, expected)
    cosines = torch.cosine_similarity(actual.double(), expected.double(), dim=-1)
    torch.testing.assert_close(verdict.cosines, cosines)
    assert verdict.same_tokens == int((actual.argmax(-1) == expected.argmax(-1)).sum()) < len(expected)
    assert verdict.statistics.startswith(f"9 positions: cosine {float(cosines.min()):.6f} minimum, ")


def test_another_rounding_is_accepted() -> None:
    assert judge_logits(logits() * (1 + 2.0**-8), logits())
    assert judge_logits(turned(logits(), 0.9995), logits())
    assert judge_logits(torch.zeros(1, 4), torch.zeros(1, 4))


def poisoned(rows: Tensor) -> Tensor:
    rows = rows.clone()
    rows[3, 5] = torch.nan
    return rows


def with_row(rows: Tensor, row: Tensor) -> Tensor:
    rows = rows.clone()
    rows[3] = row
    return rows


WRONG = {
    "one position turned": (lambda x: with_row(x, turned(x, 0.979)[3]), "1 positions with a cosine below 0.98, first"),
    "one position scaled": (lambda x: with_row(x, 1.25 * x[3]), "1 positions with a relative L2 distance beyond 0.2"),
    "one position is zero": (lambda x: with_row(x, 0 * x[3]), "1 positions with a cosine below 0.98"),
    "rows exchanged": (lambda x: x.roll(1, 0), "9 positions with a cosine below 0.98"),
    "all a little turned": (lambda x: turned(x, 0.9985), "a median cosine of 0.9985"),
    "NaN": (poisoned, "1 positions with logits that are not finite"),
    "another dtype": (lambda x: x.double(), "expected torch.float32"),
    "a position is missing": (lambda x: x[1:], r"found torch.float32 \[8, 64\]"),
}


@pytest.mark.parametrize(("change", "reason"), WRONG.values(), ids=WRONG)
def test_wrong_logits_are_refused(change: Callable[[Tensor], Tensor], reason: str) -> None:
    with pytest.raises(Exception, match=reason):
        judge_logits(change(logits()), logits()).require("logits")


def test_what_cannot_be_judged_is_an_error() -> None:
    with pytest.raises(OperandError, match="one position at least"):
        judge_logits(logits(0), logits(0))
    with pytest.raises(OperandError, match=r"LogitBounds\.median"):
        LogitBounds(median=1.5)


def scaled(*arguments: Any) -> Tensor:
    return combine(*arguments) * 1.5


def rows_exchanged(x: Tensor, *arguments: Any) -> Tensor:
    return rms_norm(x, *arguments).roll(1, 0)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_defect_inside_the_model_is_refused(tiny_checkpoint: Checkpoint, tp: int) -> None:
    """The prefill and two decode steps of the run against one prefill of the goldens; bits are equal without a
    defect."""
    session = ModelSession.open(tiny_checkpoint, ParallelLayout(tp))
    verdicts = []
    for changed in ({}, {"combine": scaled}, {"rms_norm": rows_exchanged}):
        session.operators = Operators().replace(**changed)
        tensors = forward_tensors(session, PROMPTS, 2)
        session.operators = Operators()
        verdicts.append(compare_with_goldens(session, tensors, len(PROMPTS)))
    plain, *defects = verdicts
    assert len(plain.cosines) == plain.same_tokens == sum(map(len, PROMPTS)) + 2 * len(PROMPTS)
    torch.testing.assert_close(plain.cosines, torch.ones_like(plain.cosines), rtol=0, atol=1e-12)
    assert plain.accepted
    assert not any(defects), [verdict.statistics for verdict in defects]
