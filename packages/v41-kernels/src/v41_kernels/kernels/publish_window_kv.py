"""Window KV into the paged cache, as MXFP8 (model.md sections 2.5 and 16)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.publication import publish_rows
from v41_kernels.kernels.stages.quantisers import MX_GROUP, window_bytes

ROW_TILE = 1
COLUMN_TILE = 512
# Why: every row goes to a slot of its own, so the work is one row, quantised as its groups; 512 BF16 are 1 KB.


def make_entry(*, HEAD_DIM: int) -> Callable[..., None]:
    """The entry for rows of `HEAD_DIM` channels."""

    def publish_window_kv(
        kv: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM], pypto.DT_BF16),
        slots: pypto.Tensor([pypto.DYNAMIC, 2], pypto.DT_INT32),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        window_kv: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM], pypto.DT_INT8),
        window_kv_scale: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM // MX_GROUP], pypto.DT_INT8),
    ):
        publish_rows(
            kv, slots, num_tokens[0], window_kv, window_kv_scale, HEAD_DIM, COLUMN_TILE, MX_GROUP, window_bytes
        )

    return publish_window_kv
