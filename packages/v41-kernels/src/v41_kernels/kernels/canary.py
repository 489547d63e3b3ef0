"""A kernel whose answer is known: it shows whether a caller's tensors reach the interpreter at all."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

ROWS = 8
COLUMNS = 8  # the smallest FP32 tile: one 32-byte line per row


def make_entry() -> Callable[..., None]:
    """The entry: `out = 2 x + 1`, which is 1 everywhere if the interpreter sees zeros."""

    def canary(
        x: pypto.Tensor([ROWS, COLUMNS], pypto.DT_FP32),
        out: pypto.Tensor([ROWS, COLUMNS], pypto.DT_FP32),
    ):
        pypto.set_vec_tile_shapes(ROWS, COLUMNS)
        pypto.assemble(x * 2.0 + 1.0, [0, 0], out)

    return canary
