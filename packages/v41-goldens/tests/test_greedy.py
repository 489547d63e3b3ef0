"""Greedy choice: the lowest of equal ids, and no choice among NaN."""

from __future__ import annotations

import pytest
import torch

from v41_goldens.errors import OperandError
from v41_goldens.greedy import greedy_tokens


def test_the_lowest_of_equal_ids() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [-torch.inf, -torch.inf, -1.0], [0.0, -0.0, -1.0]])
    assert greedy_tokens(logits).tolist() == [1, 0, 2, 0]
    assert greedy_tokens(torch.zeros(0, 5)).shape == (0,)
    wide = torch.zeros(1, 130_000)
    wide[0, [129_999, 70_001]] = 2.0
    assert greedy_tokens(wide).tolist() == [70_001]


def test_nan_is_refused() -> None:
    with pytest.raises(OperandError, match="NaN in row 1"):
        greedy_tokens(torch.tensor([[1.0, 2.0], [torch.nan, 5.0]]))


@pytest.mark.parametrize("shape", [(2, 0), (0, 0), (4,), (1, 2, 3)])
def test_logits_of_another_form_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(OperandError, match=r"logits: expected \[R, V\] with V of at least 1"):
        greedy_tokens(torch.zeros(shape))
