"""A tile that no unified buffer holds: traced without complaint, refused by the passes, and then pypto is poisoned."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

ROW_TILE = 256


def make_entry(*, D: int) -> Callable[..., None]:
    def double(
        x: pypto.Tensor([pypto.DYNAMIC, D], pypto.DT_FP32),
        out: pypto.Tensor([pypto.DYNAMIC, D], pypto.DT_FP32),
    ):
        pypto.set_vec_tile_shapes(ROW_TILE, D)
        for tile in pypto.loop(x.shape[0] // ROW_TILE, name="TILES", idx_name="tile"):
            x_tile = pypto.view(x, [ROW_TILE, D], [tile * ROW_TILE, 0])
            pypto.assemble(x_tile * 2.0, [tile * ROW_TILE, 0], out)

    return double
