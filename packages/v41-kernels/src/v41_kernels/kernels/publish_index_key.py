"""Index keys into the paged cache, as FP4 with E8M0 scales (model.md sections 2.7 and 16)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable

import pypto

from v41_kernels.kernels.stages.publication import publish_rows
from v41_kernels.kernels.stages.quantisers import MX_GROUP, index_bytes

ROW_TILE = 1
COLUMN_TILE = 512
# Why: every row goes to a slot of its own, so the work is one row, quantised as its groups; 128 BF16 are 256 bytes.


def make_entry(*, INDEX_DIM: int) -> Callable[..., None]:
    """The entry for rows of `INDEX_DIM` channels."""

    def publish_index_key(
        keys: pypto.Tensor([pypto.DYNAMIC, INDEX_DIM], pypto.DT_BF16),
        slots: pypto.Tensor([pypto.DYNAMIC, 2], pypto.DT_INT32),
        index_key: pypto.Tensor([pypto.DYNAMIC, INDEX_DIM // 2], pypto.DT_INT8),
        index_key_scale: pypto.Tensor([pypto.DYNAMIC, INDEX_DIM // MX_GROUP], pypto.DT_INT8),
    ):
        publish_rows(
            keys, slots, slots.shape[0], index_key, index_key_scale, INDEX_DIM, COLUMN_TILE, MX_GROUP, index_bytes
        )

    return publish_index_key
