"""More live tiles than a unified buffer holds: the compiler moves some out and in, without their valid row counts.

The tensor graph is right; after the last pass the interpreter fails on a ragged tile.
"""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

ROW_TILE = 8
PARTS = 12


def make_entry(*, D: int) -> Callable[..., None]:
    def double(
        x: pypto.Tensor([pypto.DYNAMIC, D], pypto.DT_FP32),
        out: pypto.Tensor([pypto.DYNAMIC, D], pypto.DT_FP32),
    ):
        total = x.shape[0]
        pypto.set_vec_tile_shapes(ROW_TILE, D)
        for tile in pypto.loop((total + ROW_TILE - 1) // ROW_TILE, name="TILES", idx_name="tile"):
            first = tile * ROW_TILE
            rows = pypto.min(total - first, ROW_TILE)
            x_tile = pypto.view(x, [ROW_TILE, D], [first, 0], valid_shape=[rows, D])
            parts = [x_tile * 2.0 ** (1 - PARTS)]
            for part in range(PARTS):
                parts.append(x_tile * 2.0**-part)
            whole = parts[0]
            for part in parts[1:]:
                whole = whole + part
            # One, from a value that is there only after the sum over all parts: so all of them are alive until then.
            one = pypto.amax(whole, -1, keepdim=True) * 0.0 + 1.0
            again = parts[0] * one
            for part in parts[1:]:
                again = again + part * one
            pypto.assemble(again, [first, 0], out)

    return double
