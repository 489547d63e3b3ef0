"""Rotary position embedding: frequencies, tables, rows and rotation (model.md section 7)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from v41_config.layer_plan import RopeProfile
from v41_config.model_config import ModelConfig
from v41_goldens import exact
from v41_goldens.errors import OperandError, PositionError

_TABLE_ROWS = 1 << 15
"""Table rows computed at a time: bounds the float64 intermediates of long tables."""


def rope_frequencies(config: ModelConfig, profile: RopeProfile) -> Tensor:
    """Angular frequencies of a profile, FP32 `[qk_rope_head_dim / 2]` (model.md section 7).

    "swa" uses `rope_theta` as it is; "compressed" uses `compress_rope_theta` with YaRN. Every step is rounded to
    FP32: another order of them moves cosines at position 1048575 by up to 0.01.
    """
    dim = config.qk_rope_head_dim
    base = config.rope_theta if profile == "swa" else config.compress_rope_theta
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    powers = torch.pow(float(base), exponents.to(torch.float64)).to(torch.float32)
    frequencies = 1.0 / powers
    if profile == "swa":
        return frequencies
    yarn = config.rope_scaling

    def correction(rotations: float) -> float:
        """The (fractional) pair whose wave turns `rotations` times within the original context."""
        return dim * math.log(yarn.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(correction(yarn.beta_fast)), 0)
    high = min(math.ceil(correction(yarn.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies / yarn.factor * ramp + frequencies * (1 - ramp)


def precompute_rope_tables(
    config: ModelConfig, profile: RopeProfile, capacity: int, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of positions 0 to `capacity - 1` (model.md section 7).

    The angle is the FP32 product of position and frequency; its functions follow E2.

    Returns:
        `(freqs_cos, freqs_sin)`, each FP32 `[capacity, qk_rope_head_dim / 2]` on `device`.
    """
    frequencies = rope_frequencies(config, profile)
    freqs_cos = torch.empty(capacity, frequencies.shape[0], dtype=torch.float32)
    freqs_sin = torch.empty_like(freqs_cos)
    for start in range(0, capacity, _TABLE_ROWS):
        stop = min(start + _TABLE_ROWS, capacity)
        angles = torch.arange(start, stop, dtype=torch.int64).to(torch.float32).unsqueeze(-1) * frequencies
        freqs_cos[start:stop] = exact.cos(angles)
        freqs_sin[start:stop] = exact.sin(angles)
    return freqs_cos.to(device), freqs_sin.to(device)


def materialize_rope_rows(
    freqs_cos: Tensor, freqs_sin: Tensor, position_ids: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """The table rows of the tokens of one forward (model.md section 7).

    Args:
        freqs_cos, freqs_sin: FP32 `[capacity, r/2]` tables of one profile.
        position_ids: INT32 `[T]`; a negative position (a compressed row that is not published) gives the identity
            rotation, cosine 1 and sine 0.
        num_tokens: active prefix, 0 to T.

    Returns:
        `(rope_cos, rope_sin)`, each FP32 `[T, r/2]`; rows from `num_tokens` on are padding and zero.

    Raises:
        PositionError: an active position at or beyond the table's capacity, or `num_tokens` outside 0 to T.
    """
    rows, capacity = position_ids.shape[0], freqs_cos.shape[0]
    if not 0 <= num_tokens <= rows:
        raise PositionError("materialize_rope_rows num_tokens", num_tokens, f"0 to T = {rows}")
    rope_cos = freqs_cos.new_zeros(rows, freqs_cos.shape[1])
    rope_sin = torch.zeros_like(rope_cos)
    if num_tokens:
        positions = position_ids[:num_tokens].to(torch.int64)
        highest = int(positions.max())
        if highest >= capacity:
            raise PositionError("materialize_rope_rows position_ids", highest, f"positions below capacity {capacity}")
        hidden = (positions < 0).unsqueeze(-1)
        positions = positions.clamp_min(0)
        rope_cos[:num_tokens] = freqs_cos.index_select(0, positions).masked_fill_(hidden, 1.0)
        rope_sin[:num_tokens] = freqs_sin.index_select(0, positions).masked_fill_(hidden, 0.0)
    return rope_cos, rope_sin


def apply_rope(x: Tensor, rope_cos: Tensor, rope_sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last r channels of every token; adjacent pairs are complex numbers (model.md section 7).

    Args:
        x: BF16 `[T, ..., D]`.
        rope_cos, rope_sin: FP32 `[T, r/2]`, r at most D.
        inverse: rotate backwards.

    Returns:
        BF16 `[T, ..., D]`: rotated in FP32, rounded once; the other channels are copied.
    """
    half = rope_cos.shape[-1]
    start = x.shape[-1] - 2 * half
    if start < 0 or x.shape[0] != rope_cos.shape[0] or rope_cos.shape != rope_sin.shape:
        raise OperandError("apply_rope", (tuple(x.shape), tuple(rope_cos.shape), tuple(rope_sin.shape)),
                           "x [T, ..., D], rope_cos and rope_sin [T, r/2], r <= D")  # fmt: skip
    shape = (x.shape[0], *(1,) * (x.dim() - 2), half)
    cos, sin = rope_cos.view(shape), rope_sin.view(shape)
    even, odd = x[..., start:].to(torch.float32).unflatten(-1, (half, 2)).unbind(-1)
    if inverse:
        sin = -sin
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :start], rotated.to(torch.bfloat16)), dim=-1)
