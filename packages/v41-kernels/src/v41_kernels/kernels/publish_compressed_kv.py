"""Rotated latents into the paged cache, as FP4 with E4M3 scales (model.md sections 2.6 and 16)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.publication import publish_rows
from v41_kernels.kernels.stages.quantisers import FP4_GROUP, compressed_bytes

ROW_TILE = 1
COLUMN_TILE = 512
# Why: every row goes to a slot of its own, so the work is one row, quantised as its groups; 512 BF16 are 1 KB.


def make_entry(*, HEAD_DIM: int) -> Callable[..., None]:
    """The entry for rows of `HEAD_DIM` channels."""

    def publish_compressed_kv(
        kv: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM], pypto.DT_BF16),
        slots: pypto.Tensor([pypto.DYNAMIC, 2], pypto.DT_INT32),
        compressed_kv: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM // 2], pypto.DT_INT8),
        compressed_kv_scale: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM // FP4_GROUP], pypto.DT_INT8),
    ):
        publish_rows(
            kv,
            slots,
            slots.shape[0],
            compressed_kv,
            compressed_kv_scale,
            HEAD_DIM,
            COLUMN_TILE,
            FP4_GROUP,
            compressed_bytes,
        )

    return publish_compressed_kv
