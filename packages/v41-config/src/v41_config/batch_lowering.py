"""Lowering one step: a scheduler's lengths and block tables to `ForwardMetadata`, checked before anything is made.

Ragged ranges (a request's window, the pages it writes, the groups it closes) are expanded flat, so that work and
memory follow what is live and no Python loop runs over requests or tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from v41_config.batch_checks import checked_dp_groups, checked_lengths
from v41_config.block_tables import BlockTable, PageUse, check_pages, checked_block_table, checked_state_table
from v41_config.cache_abi import STATE_TABLE, cache_pools, compressed_table
from v41_config.errors import MetadataError
from v41_config.forward_metadata import ForwardMetadata
from v41_config.model_config import ModelConfig
from v41_config.ragged_ranges import ragged_ranges

_Array = npt.NDArray[Any]
_Table = _Array | Sequence[Sequence[int]]


class _Step(NamedTuple):
    """Requests `[B]` and packed tokens `[T]` of a step, as INT64: they index. `groups`: dp_group_start_loc."""

    starts: _Array
    stored: _Array
    query_lens: _Array
    new_lens: _Array
    token_to_req: _Array
    positions: _Array
    groups: _Array


def build_forward_metadata(
    config: ModelConfig,
    query_start_loc: Sequence[int] | _Array,
    kv_seq_lens: Sequence[int] | _Array,
    window_block_table: _Table,
    compressed_block_tables: Mapping[int, _Table],
    state_block_tables: Mapping[int, _Table],
    *,
    dp_group_start_loc: Sequence[int] | _Array | None = None,
    pool_blocks: Mapping[str, int] | None = None,
) -> ForwardMetadata[_Array]:
    """Lower one step.

    Args:
        query_start_loc: [B+1], from 0, nondecreasing; equal neighbours are a request without rows.
        kv_seq_lens: [B] tokens stored before the step.
        window_block_table: [B, pages] of 128-token pages; pages wholly behind the window may be -1.
        compressed_block_tables: keyed by compression *ratio*, [B, pages] of 128 compressed rows.
        state_block_tables: keyed by ratio-2 KV source layer, [B, 1]; -1 leaves the request without compressed rows
            at that source (see `ForwardMetadata`).
        dp_group_start_loc: [groups+1], the first request of each DP group, then B, as
            `ParallelLayout.dp_group_start_loc` splits them; one group by default. Groups have pools of their own: a
            block number means one thing inside a group and another in the next.
        pool_blocks: blocks of each pool by block table, as in `CacheLayout.blocks`; ids beyond them are refused.

    What a request still needs is protected whether or not it has rows in this step: no other request may write a
    page under its live positions, nor have its state block.

    Raises:
        MetadataError: naming table, request and logical page, before anything is lowered.
    """
    starts, stored = checked_lengths(config, query_start_loc, kv_seq_lens)
    groups = checked_dp_groups(dp_group_start_loc, len(stored))
    query_lens = np.diff(starts)
    token_to_req, positions = ragged_ranges(stored, query_lens)
    step = _Step(starts, stored, query_lens, stored + query_lens, token_to_req, positions, groups)
    sizes = _checked_pool_blocks(config, pool_blocks)

    window = _checked_window_table(config, window_block_table, step, sizes.get("window"))
    states = _checked_state_tables(config, state_block_tables, step, sizes.get(STATE_TABLE))
    compresses = {
        source: states[source][:, 0] >= 0 if source in states else np.ones(len(stored), dtype=np.bool_)
        for source in config.kv_source_layer_ids
    }
    tables = _checked_compressed_tables(config, compressed_block_tables, step, compresses, sizes)

    fields: dict[str, Any] = {
        "query_start_loc": _int32(starts),
        "dp_group_start_loc": _int32(groups),
        "query_lens": _int32(query_lens),
        "logit_row_indices": _int32(np.where(query_lens > 0, starts[1:] - 1, -1)),
        "token_to_req_indices": _int32(token_to_req),
        "position_ids": _int32(positions),
        "kv_seq_lens": _int32(stored),
        "new_kv_seq_lens": _int32(step.new_lens),
        "state_block_tables": states,
        **_lower_window(config.sliding_window, window, step),
    }
    own_tables = {ratio: table.blocks.copy() for ratio, table in tables.items()}
    lowered: dict[tuple[int, bytes], dict[str, _Array]] = {}
    for source in config.kv_source_layer_ids:
        ratio = config.compress_ratios[source]
        key = (ratio, compresses[source].tobytes())
        if key not in lowered:
            lowered[key] = _lower_source(ratio, tables[ratio], compresses[source], step)
        for name, array in {"compressed_block_tables": own_tables[ratio], **lowered[key]}.items():
            fields.setdefault(name, {})[source] = array
    return ForwardMetadata(**fields)


def _int32(array: _Array) -> _Array:
    return array.astype(np.int32)


def _checked_pool_blocks(config: ModelConfig, pool_blocks: Mapping[str, int] | None) -> Mapping[str, int]:
    if pool_blocks is None:
        return {}
    _check_keys("pool_blocks", pool_blocks, {pool.block_table for pool in cache_pools(config)})
    for table, count in pool_blocks.items():
        if count < 0:
            raise MetadataError(f"pool_blocks, {table}", count, "a number of blocks")
    return pool_blocks


def _check_keys(name: str, tables: Mapping[Any, object], keys: set[Any]) -> None:
    """A key too many is as much of a mistake as one that is missing: ratios and layer ids are easily confused."""
    if set(tables) != keys:
        raise MetadataError(name, list(tables), f"exactly the keys {sorted(keys)}")


def _checked_window_table(config: ModelConfig, table: _Table, step: _Step, pool_blocks: int | None) -> BlockTable:
    window = checked_block_table("window_block_table", table, len(step.stored), pool_blocks)
    first_seen = np.maximum(step.stored - config.sliding_window + 1, 0)
    has_rows = step.query_lens > 0
    check_pages(window, PageUse(first_seen, step.stored, step.new_lens, has_rows, step.new_lens > 0), step.groups)
    return window


def _checked_state_tables(
    config: ModelConfig, tables: Mapping[int, _Table], step: _Step, pool_blocks: int | None
) -> dict[int, _Array]:
    sources = [source for source in config.kv_source_layer_ids if config.compress_ratios[source] > 1]
    _check_keys("state_block_tables", tables, set(sources))
    live = step.new_lens > 0
    checked: dict[int, _Array] = {}
    for source in sources:
        same = next((other for other in checked if tables[other] is tables[source]), None)
        checked[source] = (
            checked_state_table(source, tables[source], live, step.groups, pool_blocks)
            if same is None
            else checked[same]
        )
    return checked


def _checked_compressed_tables(
    config: ModelConfig,
    tables: Mapping[int, _Table],
    step: _Step,
    compresses: Mapping[int, _Array],
    sizes: Mapping[str, int],
) -> dict[int, BlockTable]:
    """By ratio. Pages are needed where one of the ratio's sources compresses; sources share the table."""
    sources: dict[int, list[int]] = {}
    for source in config.kv_source_layer_ids:
        sources.setdefault(config.compress_ratios[source], []).append(source)
    _check_keys("compressed_block_tables", tables, set(sources))
    checked = {}
    for ratio, layers in sources.items():
        name = f"compressed_block_tables[{ratio}] of KV source layers {', '.join(map(str, layers))}"
        table = checked_block_table(name, tables[ratio], len(step.stored), sizes.get(compressed_table(ratio)))
        published = np.logical_or.reduce([compresses[layer] for layer in layers])
        first_write, stop = step.stored // ratio, step.new_lens // ratio
        touches = published & (step.query_lens > 0)
        check_pages(table, PageUse(np.zeros_like(stop), first_write, stop, touches, published), step.groups)
        checked[ratio] = table
    return checked


def _lower_window(window: int, table: BlockTable, step: _Step) -> dict[str, _Array]:
    """Rows of each request's window are looked up once; a token's window is a run of neighbours among them."""
    has_rows = step.query_lens > 0
    first_seen = np.where(has_rows, np.maximum(step.stored - window + 1, 0), step.new_lens)
    spans = step.new_lens - first_seen
    request, position = ragged_ranges(first_seen, spans)
    rows = np.empty(len(request) + window, dtype=np.int32)
    rows[: len(request)] = table.physical_rows(request, position)
    rows[len(request) :] = -1  # so that the last token's run ends inside
    own = step.positions + (spans.cumsum() - step.new_lens)[step.token_to_req]
    lens = np.minimum(step.positions + 1, window)
    runs = np.lib.stride_tricks.as_strided(rows, (len(request) + 1, window), rows.strides * 2, writeable=False)
    indices = runs[own - lens + 1]
    if lens.min(initial=window) < window:
        indices[np.arange(window) >= lens[:, None]] = -1  # younger tokens, of the same request or the next
    return {"window_slots": rows[own].astype(np.int64), "window_indices": indices, "window_lens": _int32(lens)}


def _lower_source(ratio: int, table: BlockTable, compresses: _Array, step: _Step) -> dict[str, _Array]:
    """What sources of one ratio have in common that compress the same requests, `compresses` BOOL `[B]`."""
    first_row, stop_row, remainder = step.stored // ratio, step.new_lens // ratio, step.new_lens % ratio
    outputs, visible = stop_row - first_row, (step.positions + 1) // ratio
    if not compresses.all():
        outputs, stop_row, remainder = outputs * compresses, stop_row * compresses, remainder * compresses
        visible = visible * compresses[step.token_to_req]
    request, row = ragged_ranges(first_row, outputs)
    group_start = row * ratio
    closing_token = (step.starts[:-1] - step.stored)[request] + group_start + (ratio - 1)
    slots = np.full(len(step.positions), -1, dtype=np.int64)
    slots[closing_token] = table.physical_rows(request, row)
    rope = np.full(len(step.positions), -1, dtype=np.int32)
    rope[closing_token] = group_start
    return {
        "compressed_slots": slots,
        "index_slots": slots,
        "compressed_seq_lens": _int32(stop_row),
        "compressed_seq_remainders": _int32(remainder),
        "compressed_lens": _int32(visible),
        "compressor_output_start_loc": _int32(np.concatenate(([0], outputs.cumsum()))),
        "compressor_source_token_indices": _int32(closing_token),
        "compressor_position_ids": _int32(group_start),
        "compressed_rope_position_ids": rope,
    }
