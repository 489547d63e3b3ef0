"""Publication into paged caches: a row is quantised and its bytes are written at its slot (model.md section 16).

A cache is flat here, `[blocks * 128, bytes]`, and a slot is a row of it. Slots are INT64, taken as their two INT32
halves, the low one first; -1 is negative in both, and a slot below 2^31 is its low half.
"""

from collections.abc import Callable
from typing import Any

import pypto

from v41_kernels.kernels.stages.quantisers import groups_of
from v41_kernels.kernels.stages.rows import row_tile


def publish_row(
    row: Any, slot: Any, payload: Any, scale: Any, width: int, group: int, encode: Callable[[Any], tuple[Any, Any]]
) -> None:
    """Writes one BF16 row `[1, width]` at a slot that is not -1; `encode` gives the bytes of FP32 groups."""
    groups = width // group
    codes, factors = encode(pypto.cast(groups_of(row, 1, 1, width, group), pypto.DT_FP32))
    code_bytes = payload.shape[1]
    pypto.set_vec_tile_shapes(1, max(code_bytes, 32))
    pypto.assemble(pypto.reshape(codes, [1, code_bytes]), [slot, 0], payload)
    pypto.set_vec_tile_shapes(1, max(groups, 32))
    pypto.assemble(pypto.reshape(factors, [1, groups]), [slot, 0], scale)


def publish_rows(
    rows: Any, slots: Any, count: Any, payload: Any, scale: Any, width: int, columns: int, group: int,
    encode: Callable[[Any], tuple[Any, Any]],
) -> None:  # fmt: skip
    """Writes each of `count` BF16 rows `[T, width]` at its slot, those of -1 not; a row is read by `columns`."""
    for token in pypto.loop(count, name="TOKENS", idx_name="token"):
        slot = slots[token, 0]
        if pypto.cond(slot >= 0):
            pypto.set_vec_tile_shapes(1, min(width, columns))
            publish_row(row_tile(rows, 1, token, 1, width), slot, payload, scale, width, group, encode)
