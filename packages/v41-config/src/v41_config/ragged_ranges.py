"""Ranges of different lengths, laid out one after the other: how ragged batches are expanded without a loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_Array = npt.NDArray[Any]


def ragged_ranges(first: _Array, counts: _Array) -> tuple[_Array, _Array]:
    """`(owner, value)`, INT64 `[sum(counts)]`: `first[i], first[i] + 1, ...`, `counts[i]` of them, for each `i`."""
    owner: _Array = np.arange(len(counts)).repeat(counts)
    shift = first + counts - counts.cumsum()
    return owner, np.arange(len(owner)) + shift[owner]
