"""`DpGroupMetadata`: what one DP group runs in a step, with the slabs its tokens stand on (model.md section 18)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from v41_config.errors import SlabError
from v41_config.token_mapping import PADDING_ID, GatheredRows, LocalRows, TokenMapping

if TYPE_CHECKING:
    import torch

    from v41_config.forward_metadata import ForwardMetadata

ArrayT = TypeVar("ArrayT")


@dataclass(frozen=True, eq=False)
class DpGroupMetadata(Generic[ArrayT]):
    """The `metadata` of a group's own requests, in gathered order, and the `mapping` of its tokens to TP ranks.

    Attention takes `metadata` and `position_ids` with gathered hidden rows. What works on a rank's own slab takes the
    slab's share of ids, positions and mask from here, padding -1 and false.

    Raises:
        SlabError: the metadata has not one position for each active token of the mapping.
    """

    mapping: TokenMapping
    metadata: ForwardMetadata[ArrayT]

    def __post_init__(self) -> None:
        positions: Any = self.metadata.position_ids
        if positions.shape[0] != self.mapping.active:
            expected = f"{self.mapping.active} positions, one for each gathered token"
            raise SlabError("forward metadata", f"{positions.shape[0]} positions", expected)

    @property
    def position_ids(self) -> GatheredRows[ArrayT]:
        """INT32 `[tp * T_local]` positions of the gathered rows."""
        return self.mapping.gathered(self.metadata.position_ids, PADDING_ID)

    @property
    def token_to_req_indices(self) -> GatheredRows[ArrayT]:
        """INT32 `[tp * T_local]` batch row in the group of each gathered row."""
        return self.mapping.gathered(self.metadata.token_to_req_indices, PADDING_ID)

    def local_token_ids(self, token_ids: ArrayT, rank: int) -> LocalRows[ArrayT]:
        """`[T_local]` of the group's packed `token_ids [T]`."""
        return self.mapping.shard(token_ids, rank, PADDING_ID)

    def local_position_ids(self, rank: int) -> LocalRows[ArrayT]:
        """INT32 `[T_local]`."""
        return self.mapping.shard(self.metadata.position_ids, rank, PADDING_ID)

    def local_mask(self, rank: int) -> LocalRows[npt.NDArray[np.bool_]]:
        """BOOL `[T_local]`: rows that hold a token; only these are routed to experts."""
        return self.mapping.mask(rank)

    def to_torch(self, device: torch.device | str = "cpu") -> DpGroupMetadata[torch.Tensor]:
        """The same with tensors, as `ForwardMetadata.to_torch` makes them."""
        return DpGroupMetadata(self.mapping, self.metadata.to_torch(device))
