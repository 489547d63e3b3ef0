"""`ForwardMetadata`: one step's ragged batch, lowered once to the rows every operator reads (model.md section 17).

Token-major and packed: tokens of request 0, then of request 1, and so on; prefill, chunked prefill and decode
differ in numbers only. The arrays are NumPy; `to_torch` shares their memory on a CPU. `build_forward_metadata` makes
it from a scheduler's lengths and block tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from v41_config.dp_group_metadata import DpGroupMetadata
from v41_config.errors import LayoutError
from v41_config.parallel_layout import ParallelLayout
from v41_config.token_mapping import TokenMapping

if TYPE_CHECKING:
    import torch

ArrayT = TypeVar("ArrayT")
_Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class ForwardMetadata(Generic[ArrayT]):
    """One step of `B` requests with `T` packed tokens. INT32, but the slots, which are INT64; -1 is "none".

    | field | shape | meaning |
    |---|---|---|
    | query_start_loc | [B+1] | first packed row of each request, then T |
    | dp_group_start_loc | [groups+1] | first request of each DP group, then B |
    | query_lens | [B] | rows of each request in this step |
    | logit_row_indices | [B] | last packed row of each request, -1 where it has no row |
    | token_to_req_indices | [T] | batch row of each token (not a lasting request id) |
    | position_ids | [T] | absolute position in the request |
    | kv_seq_lens, new_kv_seq_lens | [B] | tokens stored before and after this step |
    | window_slots | [T] | physical window row that a token publishes |
    | window_indices | [T, window] | physical window rows it sees, oldest first, -1 behind the live ones |
    | window_lens | [T] | live entries of window_indices |

    and, keyed by KV source layer (equal values are shared between sources of one ratio):

    | field | shape | meaning |
    |---|---|---|
    | compressed_slots, index_slots | [T] | physical row that closes here, -1 where no group closes |
    | state_block_tables | [B, 1] | compressor state block of a request; ratio 2 only; -1 disables it |
    | compressed_block_tables | [B, pages] | logical page of compressed rows to physical block |
    | compressed_seq_lens, compressed_seq_remainders | [B] | new_kv_seq_lens divided by the ratio |
    | compressed_lens | [T] | compressed rows visible to a token, (position + 1) // ratio |
    | compressor_output_start_loc | [B+1] | first closing group of each request in the packed list of outputs |
    | compressor_source_token_indices | [outputs] | packed row of the token that closes the group |
    | compressor_position_ids | [outputs] | position of the group's first token |
    | compressed_rope_position_ids | [T] | the same, token-major; -1 where no group closes |

    **A request whose state block is -1 at a source has no compressed rows there**: its slots and RoPE positions are
    -1, it has no outputs, and its lengths, remainder and visible rows are 0, so that its tokens see their window alone
    in the layers of that source and no row is read that nobody published. The rows it skips are not in the cache
    later either, which no lowering can see: such a request keeps -1 until it starts again at position 0.

    The `rows` of a field are its first axis; what its values count, if anything, is `counts`.
    """

    query_start_loc: ArrayT = field(metadata={"rows": "B+1", "counts": "T"})
    dp_group_start_loc: ArrayT = field(metadata={"rows": "groups+1", "counts": "B"})
    query_lens: ArrayT = field(metadata={"rows": "B"})
    logit_row_indices: ArrayT = field(metadata={"rows": "B", "counts": "T"})
    token_to_req_indices: ArrayT = field(metadata={"rows": "T", "counts": "B"})
    position_ids: ArrayT = field(metadata={"rows": "T"})
    kv_seq_lens: ArrayT = field(metadata={"rows": "B"})
    new_kv_seq_lens: ArrayT = field(metadata={"rows": "B"})
    window_slots: ArrayT = field(metadata={"rows": "T"})
    window_indices: ArrayT = field(metadata={"rows": "T"})
    window_lens: ArrayT = field(metadata={"rows": "T"})
    compressed_slots: Mapping[int, ArrayT] = field(metadata={"rows": "T"})
    index_slots: Mapping[int, ArrayT] = field(metadata={"rows": "T"})
    state_block_tables: Mapping[int, ArrayT] = field(metadata={"rows": "B"})
    compressed_block_tables: Mapping[int, ArrayT] = field(metadata={"rows": "B"})
    compressed_seq_lens: Mapping[int, ArrayT] = field(metadata={"rows": "B"})
    compressed_seq_remainders: Mapping[int, ArrayT] = field(metadata={"rows": "B"})
    compressed_lens: Mapping[int, ArrayT] = field(metadata={"rows": "T"})
    compressor_output_start_loc: Mapping[int, ArrayT] = field(metadata={"rows": "B+1", "counts": "outputs"})
    compressor_source_token_indices: Mapping[int, ArrayT] = field(metadata={"rows": "outputs", "counts": "T"})
    compressor_position_ids: Mapping[int, ArrayT] = field(metadata={"rows": "outputs"})
    compressed_rope_position_ids: Mapping[int, ArrayT] = field(metadata={"rows": "T"})

    def to_torch(self, device: torch.device | str = "cpu") -> ForwardMetadata[torch.Tensor]:
        """The same fields as tensors; on a CPU they share memory. Arrays shared between sources stay shared."""
        import torch  # the only place of this distribution that needs it

        return self._converted(lambda array, _field, _source: torch.from_numpy(array).to(device))

    def for_dp_group(
        self: ForwardMetadata[_Array], layout: ParallelLayout, dp_rank: int, capacity: int | None = None
    ) -> DpGroupMetadata[_Array]:
        """The part of the step that one DP group runs, and the slabs its tokens stand on.

        Requests, tokens and outputs are counted from the group's first one; where nothing counts them, arrays are
        views of this step's. `capacity` is what slabs are cut from: the group's T unless the caller reserves more.

        Raises:
            LayoutError: no such group, another number of groups than the step was lowered for, or a capacity below
                the group's tokens.
        """
        groups = len(self.dp_group_start_loc) - 1
        if groups != layout.dp:
            raise LayoutError("dp", layout.dp, f"{groups}, the DP groups that dp_group_start_loc splits the batch into")
        if not 0 <= dp_rank < groups:
            raise LayoutError("dp_rank", dp_rank, f"0 <= dp_rank < dp = {groups}")
        group = slice(dp_rank, dp_rank + 1)
        requests = _between(self.dp_group_start_loc, group)
        tokens = _between(self.query_start_loc, requests)
        count = tokens.stop - tokens.start
        mapping = TokenMapping(layout, dp_rank, count if capacity is None else capacity, count)
        if groups == 1:
            return DpGroupMetadata(mapping, self)

        def part(array: _Array, field_axes: Mapping[str, str], source: int | None) -> _Array:
            extents = {"groups": group, "B": requests, "T": tokens}
            if source is not None:
                extents["outputs"] = _between(self.compressor_output_start_loc[source], requests)
            rows, _, has_end = field_axes["rows"].partition("+")
            values = array[extents[rows].start : extents[rows].stop + len(has_end)]
            if "counts" not in field_axes:
                return values
            return np.where(values >= 0, values - extents[field_axes["counts"]].start, values)

        return DpGroupMetadata(mapping, self._converted(part))

    def _converted(self, convert: Callable[[Any, Mapping[str, str], int | None], Any]) -> ForwardMetadata[Any]:
        """`convert(array, axes of its field, KV source)` of every array; what sources share is converted once."""
        done: dict[tuple[int, str], Any] = {}

        def once(array: Any, axes: Mapping[str, str], source: int | None) -> Any:
            key = (id(array), str(axes))
            if key not in done:
                done[key] = convert(array, axes, source)
            return done[key]

        values: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Mapping):
                values[f.name] = {source: once(array, f.metadata, source) for source, array in value.items()}
            else:
                values[f.name] = once(value, f.metadata, None)
        return ForwardMetadata(**values)


def _between(start_loc: _Array, items: slice) -> slice:
    """What a run of neighbouring `items` spans, given where each one starts."""
    return slice(int(start_loc[items.start]), int(start_loc[items.stop]))
