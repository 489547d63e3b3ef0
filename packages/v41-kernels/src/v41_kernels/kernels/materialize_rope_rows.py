"""Rows of the RoPE tables for the active tokens (model.md section 7)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable
from typing import Any

import pypto

from v41_kernels.kernels.stages.tile_shapes import tile_columns

ROW_TILE = 8
COLUMN_TILE = 1024
# Why: a table row is 128 bytes in the released model, so the work is one small copy per token and table. Eight rows
# share a task, and one select patches the negative positions of all eight; 32 rows compile four times as long. Rows
# left over go one by one: tiles of fixed size, because the compiler loses the valid row count of a tile that was put
# together from single rows (it shows only when the kernel is interpreted after the passes).


def gather_rows(table: Any, position_ids: Any, first: Any, rows: int, width: int) -> Any:
    """FP32 `[rows, width]`: table rows at positions `first ...`, row 0 in place of a negative position."""
    gathered = pypto.tensor([rows, width], pypto.DT_FP32, "gathered")
    for row in range(rows):
        position = pypto.max(position_ids[first + row], 0)
        pypto.assemble(pypto.clone(pypto.view(table, [1, width], [position, 0])), [row, 0], gathered)
    return gathered


def unrotated(position_ids: Any, first: Any, rows: int) -> Any:
    """BOOL `[rows, 1]`: where the position is negative."""
    # Through FP32, which keeps every INT32's sign: the compiler refuses to compare INT32 tiles.
    positions = pypto.cast(pypto.view(position_ids, [rows], [first]), pypto.DT_FP32)
    return pypto.lt(pypto.reshape(positions, [rows, 1]), 0.0)


def write_rows(
    freqs_cos: Any, freqs_sin: Any, position_ids: Any, rope_cos: Any, rope_sin: Any, first: Any, rows: int, width: int
) -> None:
    """Writes rows `first ... first + rows - 1` of both destinations."""
    pypto.set_vec_tile_shapes(rows, tile_columns(width, COLUMN_TILE))
    identity = unrotated(position_ids, first, rows)
    cos = gather_rows(freqs_cos, position_ids, first, rows, width)
    pypto.assemble(pypto.where(identity, 1.0, cos), [first, 0], rope_cos)
    sin = gather_rows(freqs_sin, position_ids, first, rows, width)
    pypto.assemble(pypto.where(identity, 0.0, sin), [first, 0], rope_sin)


def make_entry(*, HALF_ROPE: int) -> Callable[..., None]:
    """The entry for tables of `HALF_ROPE` columns and any capacity."""

    def materialize_rope_rows(
        freqs_cos: pypto.Tensor([pypto.DYNAMIC, HALF_ROPE], pypto.DT_FP32),
        freqs_sin: pypto.Tensor([pypto.DYNAMIC, HALF_ROPE], pypto.DT_FP32),
        position_ids: pypto.Tensor([pypto.DYNAMIC], pypto.DT_INT32),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        rope_cos: pypto.Tensor([pypto.DYNAMIC, HALF_ROPE], pypto.DT_FP32),
        rope_sin: pypto.Tensor([pypto.DYNAMIC, HALF_ROPE], pypto.DT_FP32),
    ):
        active = num_tokens[0]
        tiles = active // ROW_TILE
        for tile in pypto.loop(tiles, name="TILES", idx_name="tile"):
            first = tile * ROW_TILE
            write_rows(freqs_cos, freqs_sin, position_ids, rope_cos, rope_sin, first, ROW_TILE, HALF_ROPE)
        for left in pypto.loop(active % ROW_TILE, name="ROWS_LEFT", idx_name="left"):
            first = tiles * ROW_TILE + left
            write_rows(freqs_cos, freqs_sin, position_ids, rope_cos, rope_sin, first, 1, HALF_ROPE)

    return materialize_rope_rows
