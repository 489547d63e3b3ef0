"""Hyper-connection expand: a sublayer's output spread over the residual streams (model.md section 5)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable
from typing import Any

import pypto

from v41_kernels.kernels.stages.compensated import compensated_sum
from v41_kernels.kernels.stages.tile_shapes import tile_columns

ROW_TILE = 8
COLUMN_TILE = 512
# Why: the streams of a tile are read once and serve every destination stream. 8 x 512 FP32 is 16 KB: four streams, a
# product and the two parts of the running sum stay below the 192 KB of a 910B vector core's unified buffer (248 KB on
# a 950). With 1024 columns the compiler moves tiles out and back in, and its interpreter cannot follow that on a
# ragged tile; 4096 do not fit at all.


def plane(tensor: Any, index: int, first: Any, rows: Any, width: int, column_tile: int) -> Any:
    """`tensor[first : first + rows, index, :]` of a `[T, N, width]` tensor, as a tile `[R, width]`."""
    pypto.set_vec_tile_shapes(ROW_TILE, 1, column_tile)
    cut = pypto.view(tensor, [ROW_TILE, 1, width], [first, index, 0], valid_shape=[rows, 1, width])
    flat = pypto.reshape(cut, [ROW_TILE, width], valid_shape=[rows, width])
    pypto.set_vec_tile_shapes(ROW_TILE, column_tile)
    return flat


def write_plane(tile: Any, tensor: Any, index: int, first: Any, rows: Any, width: int, column_tile: int) -> None:
    """The opposite of `plane`."""
    pypto.set_vec_tile_shapes(ROW_TILE, 1, column_tile)
    cut = pypto.reshape(tile, [ROW_TILE, 1, width], valid_shape=[rows, 1, width])
    pypto.assemble(cut, [first, index, 0], tensor)
    pypto.set_vec_tile_shapes(ROW_TILE, column_tile)


def expand_rows(
    y: Any, x_hc: Any, post: Any, comb: Any, out: Any, first: Any, rows: Any, HC: int, D: int, column_tile: int
) -> None:
    """Writes rows `first ... first + rows - 1` of every destination stream."""
    pypto.set_vec_tile_shapes(ROW_TILE, column_tile)
    y_tile = pypto.cast(pypto.view(y, [ROW_TILE, D], [first, 0], valid_shape=[rows, D]), pypto.DT_FP32)
    post_tile = pypto.view(post, [ROW_TILE, HC], [first, 0], valid_shape=[rows, HC])
    streams = []
    shares = []
    for j in range(HC):
        streams.append(pypto.cast(plane(x_hc, j, first, rows, D, column_tile), pypto.DT_FP32))
        shares.append(plane(comb, j, first, rows, HC, column_tile))
    for k in range(HC):
        terms = []
        for j in range(HC):
            terms.append(streams[j] * shares[j][:, k : k + 1])
        expanded = y_tile * post_tile[:, k : k + 1] + compensated_sum(terms)
        write_plane(pypto.cast(expanded, pypto.DT_BF16), out, k, first, rows, D, column_tile)


def make_entry(*, D: int, HC: int) -> Callable[..., None]:
    """The entry for `HC` streams of `D` channels."""
    column_tile = tile_columns(D, COLUMN_TILE)

    def mhc_post(
        y: pypto.Tensor([pypto.DYNAMIC, D], pypto.DT_BF16),
        x_hc: pypto.Tensor([pypto.DYNAMIC, HC, D], pypto.DT_BF16),
        post: pypto.Tensor([pypto.DYNAMIC, HC], pypto.DT_FP32),
        comb: pypto.Tensor([pypto.DYNAMIC, HC, HC], pypto.DT_FP32),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        out: pypto.Tensor([pypto.DYNAMIC, HC, D], pypto.DT_BF16),
    ):
        active = num_tokens[0]
        for tile in pypto.loop((active + ROW_TILE - 1) // ROW_TILE, name="TILES", idx_name="tile"):
            first = tile * ROW_TILE
            rows = pypto.min(active - first, ROW_TILE)
            expand_rows(y, x_hc, post, comb, out, first, rows, HC, D, column_tile)

    return mhc_post
