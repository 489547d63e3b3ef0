"""Deterministic top-k: higher score first, then lower index (model.md section 3, rule E6)."""

from __future__ import annotations

import torch
from torch import Tensor


def _ordered_keys(scores: Tensor) -> Tensor:
    """INT64 keys, all different along the last dimension, in the order score ascending, then index descending."""
    bits = scores.float().contiguous().view(torch.int32).long()
    monotone = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)  # -0 becomes 0, as +0 is
    count = scores.shape[-1]
    return monotone * (1 << 31) + torch.arange(count - 1, -1, -1, device=scores.device)


def top_k_indices(scores: Tensor, k: int) -> Tensor:
    """INT64 `[..., min(k, n)]` indices of the best entries of `scores` `[..., n]` (not NaN), best first."""
    return _ordered_keys(scores).topk(min(k, scores.shape[-1]), dim=-1, sorted=True).indices


def top_k_mask(scores: Tensor, k: int) -> Tensor:
    """Bool `[..., n]`: the entries that `top_k_indices` names."""
    mask = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    return mask.scatter_(-1, top_k_indices(scores, k), True)


def select_positions(scores: Tensor, k: int) -> Tensor:
    """INT32 `[..., k]`: the best `k` entries with a score above -inf, in ascending position, padded with -1."""
    best = top_k_indices(scores, k)
    nowhere = scores.shape[-1]
    best = torch.where(scores.gather(-1, best) > -torch.inf, best, nowhere).sort(dim=-1).values
    best = torch.where(best < nowhere, best, -1).int()
    return torch.nn.functional.pad(best, (0, k - best.shape[-1]), value=-1)
