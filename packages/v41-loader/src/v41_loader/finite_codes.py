"""Refuses stored codes that are no finite number: one of them makes every token after it wrong, and finite.

The most that public readers do is to look at results, where the sink, the clamp of the activations and the quantisation
of the next operand have long made a number of a NaN. Packed FP4 has no such code.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from v41_loader.errors import NonFiniteWeightError, ScaleNanError
from v41_loader.rules import DTYPE_BYTES

_E8M0_NAN = 255

_FIRST_NON_FINITE = {"F8_E4M3": 0x7F, "BF16": 0x7F80, "F32": 0x7F800000}
"""The smallest bits of formats with a sign that are infinity or NaN; all larger ones, but for the sign, are so too."""

_BLOCK_BYTES = 256 << 10
"""Stays in a core's cache between the comparisons."""


def require_finite(
    data: npt.NDArray[np.uint8],
    dtype: str,
    tensor: str,
    file: str,
    shape: tuple[int, ...],
    origin: tuple[int, ...] | None = None,
) -> None:
    """Look at the bytes of a block of stored items: `shape` of them, the first at `origin` of the tensor.

    Raises:
        ScaleNanError: an E8M0 code is 255.
        NonFiniteWeightError: an E4M3, BF16 or F32 item is infinite or NaN.
    """
    if dtype == "I8":
        return
    items = data.reshape(-1).view(f"<u{DTYPE_BYTES[dtype]}")
    step = _BLOCK_BYTES // items.itemsize
    for begin in range(0, len(items), step):
        block = items[begin : begin + step]
        if _has_non_finite(block, dtype):
            flat = begin + _first_non_finite(block, dtype)
            inside = np.unravel_index(flat, shape)
            at = [int(index) + start for index, start in zip(inside, origin or (0,) * len(shape), strict=True)]
            where, found = f"{tensor}{at} in {file}", int(items[flat])
            if dtype == "F8_E8M0":
                raise ScaleNanError(where, found, "an E8M0 code from 0 to 254")
            raise NonFiniteWeightError(where, found, f"the bits of a finite {dtype} number")


def _has_non_finite(items: npt.NDArray[np.unsignedinteger], dtype: str) -> bool:
    """Two maxima without a temporary: as signed numbers the bits above 0 come last, as unsigned ones those below."""
    if dtype == "F8_E8M0":
        return bool(items.max(initial=0) == _E8M0_NAN)
    first, sign = _FIRST_NON_FINITE[dtype], 1 << (8 * items.itemsize - 1)
    signed = items.view(f"<i{items.itemsize}")
    return bool(items.max(initial=0) >= sign + first or signed.max(initial=0) >= first)


def _first_non_finite(items: npt.NDArray[np.unsignedinteger], dtype: str) -> int:
    if dtype == "F8_E8M0":
        return int((items == _E8M0_NAN).argmax())
    magnitude = (1 << (8 * items.itemsize - 1)) - 1
    return int(((items & magnitude) >= _FIRST_NON_FINITE[dtype]).argmax())
