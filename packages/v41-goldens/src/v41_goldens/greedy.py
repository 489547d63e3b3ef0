"""Greedy choice of the next token (model.md section 15)."""

from __future__ import annotations

import torch
from torch import Tensor

from v41_goldens.errors import OperandError


def greedy_tokens(logits: Tensor) -> Tensor:
    """The largest logit's id of each row, the lowest id where several are equal: FP32 `[R, V]` -> INT64 `[R]`.

    `torch.argmax` leaves open which of several equal entries it names.

    Raises:
        OperandError: not two dimensions, no vocabulary, or a row that holds a NaN, which has no largest entry.
    """
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise OperandError("logits", tuple(logits.shape), "[R, V] with V of at least 1")
    best = logits.amax(dim=-1, keepdim=True)
    if bool(best.isnan().any()):
        raise OperandError("logits", f"NaN in row {int(best.isnan().flatten().nonzero()[0])}", "numbers")
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return torch.where(logits == best, ids, logits.shape[-1]).amin(dim=-1)
