"""Comparing one computed tensor with a stored one, to the bit."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor

Stage = Literal["layer-local", "end-to-end"]

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
"""Types of ids, counts and masks; they compare with one another by value."""

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


@dataclass(frozen=True)
class TensorReport:
    """How one tensor compares. `max_ulp` counts representable numbers in between (None: integers, or NaN met a number);
    `passed` is what the rule says: no mismatch, or a relative L2 distance within the bound that was asked for."""

    stage: Stage
    key: str
    elements: int
    mismatches: int
    max_ulp: int | None
    relative_l2: float
    passed: bool
    note: str = ""

    def to_json(self) -> dict[str, object]:
        """The fields; JSON has no number for an infinite distance, or one that involves NaN, so that is null."""
        return asdict(self) | {"relative_l2": self.relative_l2 if math.isfinite(self.relative_l2) else None}


def compare(stage: Stage, key: str, ours: Tensor, stored: Tensor, max_relative_l2: float = 0.0) -> TensorReport:
    """Element by element. Floats compare by their bits, but any NaN equals any NaN; integers and masks by value.

    `max_relative_l2 = 0` demands equal bits; a larger bound accepts floats within it and never integers. Another
    shape fails, and so does another float type, or floats where integers are computed: nothing is converted.
    """
    ours, stored = _by_value(ours), _by_value(stored)
    if ours.shape != stored.shape or ours.dtype != stored.dtype:
        note = f"computed {_kind(ours)}, stored {_kind(stored)}"
        return TensorReport(stage, key, stored.numel(), stored.numel(), None, float("inf"), False, note)
    if ours.dtype not in _BITS:
        mismatches = int((ours != stored).sum())
        return TensorReport(stage, key, stored.numel(), mismatches, None, float(mismatches > 0), mismatches == 0)
    differ = (ours.contiguous().view(_BITS[ours.dtype]) != stored.contiguous().view(_BITS[ours.dtype])) & ~(
        ours.isnan() & stored.isnan()
    )
    mismatches = int(differ.sum())
    if not mismatches:
        return TensorReport(stage, key, stored.numel(), 0, 0, 0.0, True)
    a, b = ours[differ], stored[differ]
    ulp = None if bool((a.isnan() | b.isnan()).any()) else int((_ordinal(a) - _ordinal(b)).abs().max())
    distance = float((a.double() - b.double()).norm())
    base = float(stored.double().nan_to_num(0.0, 0.0, 0.0).norm())
    relative = distance / base if base else float("inf")
    return TensorReport(stage, key, stored.numel(), mismatches, ulp, relative, relative <= max_relative_l2 > 0)


def _by_value(tensor: Tensor) -> Tensor:
    return tensor.to(torch.int64) if tensor.dtype in INTEGERS else tensor


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _ordinal(x: Tensor) -> Tensor:
    """A float's place among all floats of its type, INT64; +0 and -0 are one apart."""
    bits = x.contiguous().view(_BITS[x.dtype]).long()
    sign_bit = 1 << (x.element_size() * 8 - 1)
    return torch.where(bits < 0, -(bits & (sign_bit - 1)) - 1, bits)
