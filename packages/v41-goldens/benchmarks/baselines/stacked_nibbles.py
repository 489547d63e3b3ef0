"""MXFP4 as it is usually unpacked: a look-up for the low nibbles, one for the high ones, stacked, times the scale."""

from __future__ import annotations

import torch
from torch import Tensor

from v41_goldens.number_formats import E2M1_MAGNITUDES

_VALUES = (*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES))


def dequantize_stacked(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`[N, K]` of int8 `[N, K/2]` and E8M0 `[N, K/32]`."""
    table = torch.tensor(_VALUES, dtype=dtype)
    codes = packed.view(torch.uint8)
    values = torch.stack([table[(codes & 0xF).int()], table[(codes >> 4).int()]], dim=-1).flatten(-2)
    return (values.unflatten(-1, (-1, 32)) * scale.to(dtype).unsqueeze(-1)).flatten(-2)
