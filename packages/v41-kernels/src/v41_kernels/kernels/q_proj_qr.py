"""The normed low-rank query latent (model.md section 8)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.projections import fp8_projection, normed

ROW_TILE = 8
COLUMN_TILE = 1024
# Why: as in `quantized_linear`; the projected rows (8 x 1,280 BF16, 20 KB) stay on chip until all their channels are
# there to be normed. All eight are kept, valid or not: the compiler forgets how many rows of such a tile are.


def make_entry(*, D: int, Q_LORA: int, eps: float) -> Callable[..., None]:
    """The entry for `D` channels and a latent of `Q_LORA`."""

    def q_proj_qr(
        x: pypto.Tensor([pypto.DYNAMIC, D], pypto.DT_BF16),
        wq_a: pypto.Tensor([Q_LORA, D], pypto.DT_INT8),
        wq_a_scale: pypto.Tensor([Q_LORA // 32, D // 32], pypto.DT_INT8),
        q_norm: pypto.Tensor([Q_LORA], pypto.DT_BF16),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        qr: pypto.Tensor([pypto.DYNAMIC, Q_LORA], pypto.DT_BF16),
    ):
        active = num_tokens[0]
        for tile in pypto.loop((active + ROW_TILE - 1) // ROW_TILE, name="TILES", idx_name="tile"):
            first = tile * ROW_TILE
            rows = pypto.min(active - first, ROW_TILE)
            projected = fp8_projection(x, wq_a, wq_a_scale, first, rows, ROW_TILE, Q_LORA, D, COLUMN_TILE)
            for _once in pypto.loop(1, name="NORM", idx_name="once"):
                pypto.assemble(normed(projected, q_norm, ROW_TILE, rows, Q_LORA, eps), [first, 0], qr)

    return q_proj_qr
