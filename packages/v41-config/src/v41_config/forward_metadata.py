"""`ForwardMetadata`: one step's ragged batch, lowered once to the rows every operator reads.

Token-major and packed: tokens of request 0, then of request 1, and so on; prefill, chunked prefill and decode
differ in numbers only. The arrays are NumPy; `to_torch` shares their memory on a CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from v41_config.batch_checks import check_live_pages, check_state_blocks, checked_lengths, checked_table
from v41_config.cache_abi import BLOCK_ROWS
from v41_config.errors import MetadataError
from v41_config.model_config import ModelConfig

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
    | query_lens | [B] | rows of each request in this step |
    | logit_row_indices | [B] | last packed row of each request, -1 where it has no row |
    | token_to_req_indices | [T] | batch row of each token (not a lasting request id) |
    | position_ids | [T] | absolute position in the request |
    | kv_seq_lens, new_kv_seq_lens | [B] | tokens stored before and after this step |
    | window_slots | [T] | physical window row that a token publishes |
    | window_indices | [T, window] | physical window rows it sees, oldest first, -1 behind the live ones |
    | window_lens | [T] | live entries of window_indices |
    | window_block_table | [B, pages] | logical page to physical block; -1 where freed |

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
    """

    query_start_loc: ArrayT
    query_lens: ArrayT
    logit_row_indices: ArrayT
    token_to_req_indices: ArrayT
    position_ids: ArrayT
    kv_seq_lens: ArrayT
    new_kv_seq_lens: ArrayT
    window_slots: ArrayT
    window_indices: ArrayT
    window_lens: ArrayT
    window_block_table: ArrayT
    compressed_slots: Mapping[int, ArrayT]
    index_slots: Mapping[int, ArrayT]
    state_block_tables: Mapping[int, ArrayT]
    compressed_block_tables: Mapping[int, ArrayT]
    compressed_seq_lens: Mapping[int, ArrayT]
    compressed_seq_remainders: Mapping[int, ArrayT]
    compressed_lens: Mapping[int, ArrayT]
    compressor_output_start_loc: Mapping[int, ArrayT]
    compressor_source_token_indices: Mapping[int, ArrayT]
    compressor_position_ids: Mapping[int, ArrayT]
    compressed_rope_position_ids: Mapping[int, ArrayT]

    def to_torch(self, device: torch.device | str = "cpu") -> ForwardMetadata[torch.Tensor]:
        """The same fields as tensors; on a CPU they share memory. Arrays shared between sources stay shared."""
        import torch  # the only place of this distribution that needs it

        converted: dict[int, torch.Tensor] = {}

        def convert(array: Any) -> torch.Tensor:
            if id(array) not in converted:
                converted[id(array)] = torch.from_numpy(array).to(device)
            return converted[id(array)]

        def field(value: Any) -> Any:
            return {key: convert(a) for key, a in value.items()} if isinstance(value, dict) else convert(value)

        return ForwardMetadata(**{f.name: field(getattr(self, f.name)) for f in dataclasses.fields(self)})


class _Step(NamedTuple):
    """Requests `[B]` and packed tokens `[T]` of a step, as INT64."""

    stored: _Array
    new_lens: _Array
    token_to_req: _Array
    positions: _Array


def build_forward_metadata(
    config: ModelConfig,
    query_start_loc: Sequence[int] | _Array,
    kv_seq_lens: Sequence[int] | _Array,
    window_block_table: _Array | Sequence[Sequence[int]],
    compressed_block_tables: Mapping[int, _Array | Sequence[Sequence[int]]],
    state_block_tables: Mapping[int, _Array | Sequence[Sequence[int]]],
) -> ForwardMetadata[_Array]:
    """Lower one step.

    Args:
        query_start_loc: [B+1], from 0, nondecreasing; equal neighbours are a request without rows.
        kv_seq_lens: [B] tokens stored before the step.
        window_block_table: [B, pages] of 128-token pages; pages wholly behind the window may be -1.
        compressed_block_tables: keyed by compression *ratio*, [B, pages] of 128 compressed rows.
        state_block_tables: keyed by ratio-2 KV source layer, [B, 1]; -1 suppresses that request's publication.

    Raises:
        MetadataError: naming table, request and logical page, before anything is written.
    """
    starts, stored = checked_lengths(config, query_start_loc, kv_seq_lens)
    requests = len(stored)
    query_lens = np.diff(starts)
    new_lens = stored + query_lens
    token_to_req = np.repeat(np.arange(requests), query_lens)
    positions = np.arange(starts[-1]) - starts[:-1][token_to_req] + stored[token_to_req]
    step = _Step(stored, new_lens, token_to_req, positions)

    window_table = checked_table("window_block_table", window_block_table, requests)
    first_seen = np.maximum(stored - config.sliding_window + 1, 0)
    check_live_pages("window_block_table", window_table, first_read=first_seen, first_write=stored, stop=new_lens,
                     active=query_lens > 0)  # fmt: skip
    window_slots = _physical_rows(window_table, token_to_req, positions)
    window_lens = np.minimum(positions + 1, config.sliding_window)
    offsets = np.arange(config.sliding_window)
    seen = (positions - window_lens + 1)[:, None] + offsets
    live = offsets < window_lens[:, None]
    window_rows = _physical_rows(window_table, token_to_req[:, None], np.where(live, seen, positions[:, None]))

    by_ratio = {
        ratio: _lower_ratio(ratio, table, step)
        for ratio, table in _checked_ratio_tables(config, compressed_block_tables, requests).items()
    }
    _check_keys("state_block_tables", state_block_tables,
                {source for source in config.kv_source_layer_ids if config.compress_ratios[source] > 1})  # fmt: skip
    by_source: dict[str, dict[int, _Array]] = {name: {} for name in _SOURCE_FIELDS}
    states: dict[int, _Array] = {}
    publications: dict[tuple[int, bytes], dict[str, _Array]] = {}
    for source in config.kv_source_layer_ids:
        ratio = config.compress_ratios[source]
        enabled = np.ones(requests, dtype=bool)
        if ratio > 1:
            states[source] = check_state_blocks(source, state_block_tables[source], query_lens)
            enabled = states[source][:, 0] >= 0
        key = (ratio, enabled.tobytes())
        if key not in publications:
            publications[key] = _publication(ratio, by_ratio[ratio], enabled, step)
        for name in _SOURCE_FIELDS:
            by_source[name][source] = publications[key][name]

    return ForwardMetadata(
        query_start_loc=_int32(starts),
        query_lens=_int32(query_lens),
        logit_row_indices=_int32(np.where(query_lens > 0, starts[1:] - 1, -1)),
        token_to_req_indices=_int32(token_to_req),
        position_ids=_int32(positions),
        kv_seq_lens=_int32(stored),
        new_kv_seq_lens=_int32(new_lens),
        window_slots=window_slots,
        window_indices=_int32(np.where(live, window_rows, -1)),
        window_lens=_int32(window_lens),
        window_block_table=_int32(window_table),
        state_block_tables=states,
        **by_source,
    )


_SOURCE_FIELDS = (
    "compressed_slots",
    "index_slots",
    "compressed_block_tables",
    "compressed_seq_lens",
    "compressed_seq_remainders",
    "compressed_lens",
    "compressor_output_start_loc",
    "compressor_source_token_indices",
    "compressor_position_ids",
    "compressed_rope_position_ids",
)


def _int32(array: _Array) -> _Array:
    return np.ascontiguousarray(array, dtype=np.int32)


def _physical_rows(table: _Array, request: _Array, row: _Array) -> _Array:
    """Physical rows of a request's logical rows, through its block table."""
    rows: _Array = table[request, row // BLOCK_ROWS] * int(BLOCK_ROWS) + row % BLOCK_ROWS
    return rows


def _checked_ratio_tables(
    config: ModelConfig, tables: Mapping[int, _Array | Sequence[Sequence[int]]], requests: int
) -> dict[int, _Array]:
    ratios = {config.compress_ratios[source] for source in config.kv_source_layer_ids}
    _check_keys("compressed_block_tables", tables, ratios)
    return {r: checked_table(f"compressed_block_tables[{r}]", tables[r], requests) for r in ratios}


def _check_keys(name: str, tables: Mapping[int, object], keys: set[int]) -> None:
    """A key too many is as much of a mistake as one that is missing: ratios and layer ids are easily confused."""
    if set(tables) != keys:
        raise MetadataError(name, list(tables), f"exactly the keys {sorted(keys)}")


def _lower_ratio(ratio: int, table: _Array, step: _Step) -> dict[str, _Array]:
    """What all sources of one ratio share; `closing_slots` before any source suppresses publication."""
    stored, new_lens, token_to_req, positions = step
    new_rows = new_lens // ratio
    check_live_pages(f"compressed_block_tables[{ratio}]", table, first_read=np.zeros_like(stored),
                     first_write=stored // ratio, stop=new_rows, active=new_lens > stored)  # fmt: skip
    closes = (positions + 1) % ratio == 0
    rows = np.where(closes, positions // ratio, 0)
    slots = _physical_rows(table, token_to_req, rows) if table.shape[1] else np.zeros_like(positions)
    return {
        "closes": closes,
        "closing_slots": slots,
        "compressed_block_tables": _int32(table),
        "compressed_seq_lens": _int32(new_rows),
        "compressed_seq_remainders": _int32(new_lens % ratio),
        "compressed_lens": _int32((positions + 1) // ratio),
    }


def _publication(ratio: int, shared: dict[str, _Array], enabled: _Array, step: _Step) -> dict[str, _Array]:
    """What a source of that ratio publishes, where `enabled [B]` of its requests have a state block."""
    positions = step.positions
    closes = shared["closes"] & enabled[step.token_to_req]
    slots = np.where(closes, shared["closing_slots"], -1)
    closing_tokens = np.flatnonzero(closes)
    group_starts = positions - (ratio - 1)
    outputs = np.bincount(step.token_to_req[closing_tokens], minlength=len(enabled))
    return {
        **shared,
        "compressed_slots": slots,
        "index_slots": slots,
        "compressor_output_start_loc": _int32(np.concatenate([[0], np.cumsum(outputs)])),
        "compressor_source_token_indices": _int32(closing_tokens),
        "compressor_position_ids": _int32(group_starts[closing_tokens]),
        "compressed_rope_position_ids": _int32(np.where(closes, group_starts, -1)),
    }
