"""Root-mean-square normalisation (model.md section 6)."""

from __future__ import annotations

import torch
from torch import Tensor

from v41_goldens import exact
from v41_goldens.operand_shapes import check_shapes


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x * rsqrt(mean(x^2) + eps) * weight` in FP32, one rounding at the end (model.md section 6).

    Args:
        x: BF16 or FP32 `[..., D]`.
        weight: BF16 `[D]`, promoted to FP32.
        eps: added to the mean of squares.

    Returns:
        BF16 `[..., D]`.

    Raises:
        OperandError: a weight of another width.
    """
    check_shapes("rms_norm", any_rows=True, x=x, weight=weight)
    values = x.to(torch.float32)
    return (values * inverse_rms(values, eps)).mul_(weight.to(torch.float32)).to(torch.bfloat16)


def inverse_rms(values: Tensor, eps: float) -> Tensor:
    """FP32 `rsqrt(mean(x^2) + eps)` of FP32 `[..., D]`, as `[..., 1]`; squares in FP32, their mean by E3."""
    return exact.rsqrt(exact.mean(values * values, -1, keepdim=True) + eps)
