"""Greedy choice of the next token (model.md section 15)."""

from __future__ import annotations

import torch
from torch import Tensor

from v41_goldens.errors import OperandError


def greedy_tokens(logits: Tensor) -> Tensor:
    """The largest logit's id of each row, the lowest id where several are equal: FP32 `[R, V]` -> INT64 `[R]`.

    `torch.argmax` leaves open which of several equal entries it names.

    Raises:
        OperandError: a row holds a NaN, which has no largest entry.
    """
    best = logits.amax(dim=-1, keepdim=True)
    if bool(best.isnan().any()):
        raise OperandError("logits", f"NaN in row {int(best.isnan().flatten().nonzero()[0])}", "numbers")
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return torch.where(logits == best, ids, logits.shape[-1]).amin(dim=-1)
