"""The rows that one DP group runs in one step, with the pages they live in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from v41_config import DpGroupMetadata, ModelConfig, ParallelLayout, TokenMapping, build_forward_metadata
from v41_model.errors import RequestError

__all__ = ["StepBatch"]


@dataclass(frozen=True)
class StepBatch:
    """Packed rows of B requests; prefill, chunked prefill and decode differ in numbers only.

    ``token_ids`` INT32 ``[T]``, ``query_start_loc`` ``[B + 1]``, ``kv_seq_lens`` ``[B]`` tokens stored before the
    step; the block tables are the caller's, as :func:`v41_config.build_forward_metadata` takes them. An empty batch
    (B = 0) is an idle DP group.

    Errors: :class:`RequestError` when the number of ids is not what ``query_start_loc`` ends with, or either is no
    one-dimensional array of integers.
    """

    token_ids: npt.NDArray[np.int32]
    query_start_loc: npt.NDArray[Any]
    kv_seq_lens: npt.NDArray[Any]
    window_block_table: npt.NDArray[Any]
    compressed_block_tables: Mapping[int, npt.NDArray[Any]]
    state_block_tables: Mapping[int, npt.NDArray[Any]]

    def __post_init__(self) -> None:
        for name in ("token_ids", "query_start_loc"):
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
                found = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else array
                raise RequestError(f"step batch {name}", found, "a NumPy array of integers in one dimension")
        if len(self.query_start_loc) == 0:
            raise RequestError("step batch query_start_loc", [], "0, then where each request ends")
        if len(self.token_ids) != int(self.query_start_loc[-1]):
            expected = f"{int(self.query_start_loc[-1])}, where query_start_loc ends"
            raise RequestError("step batch", f"{len(self.token_ids)} token ids", expected)

    @staticmethod
    def idle(config: ModelConfig) -> StepBatch:
        """No request and no row."""
        none = np.zeros(0, dtype=np.int32)
        table = np.zeros((0, 0), dtype=np.int32)
        ratios = {i: config.compress_ratios[i] for i in config.kv_source_layer_ids}
        return StepBatch(
            token_ids=none,
            query_start_loc=np.zeros(1, dtype=np.int32),
            kv_seq_lens=none,
            window_block_table=table,
            compressed_block_tables=dict.fromkeys(ratios.values(), table),
            state_block_tables={i: np.zeros((0, 1), dtype=np.int32) for i, ratio in ratios.items() if ratio > 1},
        )

    def lower(
        self,
        config: ModelConfig,
        layout: ParallelLayout,
        dp_rank: int,
        *,
        capacity: int | None = None,
        pool_blocks: Mapping[str, int] | None = None,
        device: torch.device | str = "cpu",
    ) -> tuple[torch.Tensor, DpGroupMetadata[torch.Tensor]]:
        """Check the batch and turn it into tensors: token ids INT32 ``[T]``, metadata and slabs.

        ``dp_rank`` is the group that runs it, ``capacity`` what slabs are cut from (T by default), ``pool_blocks`` the
        blocks there are per block table.

        Errors: :class:`RequestError` for an id outside the vocabulary, :class:`v41_config.MetadataError` for tables
        or lengths that do not fit, :class:`v41_config.LayoutError` for a capacity below T.
        """
        outside = np.flatnonzero((self.token_ids < 0) | (self.token_ids >= config.vocab_size))
        if len(outside):
            row = int(outside[0])
            raise RequestError(f"token id of row {row}", int(self.token_ids[row]), f"0 <= id < {config.vocab_size}")
        metadata = build_forward_metadata(
            config,
            self.query_start_loc,
            self.kv_seq_lens,
            self.window_block_table,
            self.compressed_block_tables,
            self.state_block_tables,
            pool_blocks=pool_blocks,
        )
        count = len(self.token_ids)
        mapping = TokenMapping(layout, dp_rank, count if capacity is None else capacity, count)
        token_ids = torch.from_numpy(np.ascontiguousarray(self.token_ids, dtype=np.int32))
        return token_ids.to(device), DpGroupMetadata(mapping, metadata).to_torch(device)
