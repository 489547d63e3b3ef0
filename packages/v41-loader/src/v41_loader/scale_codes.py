"""Refuses NaN among E8M0 scales: one poisons a whole tile, and a reader that ignores NaN makes it 2^128."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from v41_loader.errors import ScaleNanError

_E8M0_NAN = 255


def require_numbers(codes: npt.NDArray[np.uint8], tensor: str, file: str, origin: tuple[int, ...] = ()) -> None:
    """Raise `ScaleNanError` where a code is NaN. `codes` has the shape of the tensor, or of its block at `origin`."""
    if codes.max(initial=0) == _E8M0_NAN:
        inside = np.unravel_index(codes.argmax(), codes.shape)
        at = [int(index) + start for index, start in zip(inside, origin or (0,) * codes.ndim, strict=True)]
        raise ScaleNanError(f"{tensor}{at} in {file}", _E8M0_NAN, "an E8M0 code from 0 to 254")
