"""The comparison: the same contract lowered request by request, as one writes it down first.

Each request's fields are made with NumPy from its own positions and appended to lists; checks, where they are asked
for, look at one request after the other. It shares no code with `v41_config.batch_lowering`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from v41_config import BLOCK_ROWS, ForwardMetadata, MetadataError, ModelConfig

Array = npt.NDArray[Any]


def lower_per_request(
    config: ModelConfig,
    query_start_loc: Array,
    kv_seq_lens: Array,
    window_block_table: Array,
    compressed_block_tables: Mapping[int, Array],
    state_block_tables: Mapping[int, Array],
    *,
    checks: bool = True,
) -> ForwardMetadata[Array]:
    """`build_forward_metadata` for one DP group; `checks=False` believes the tables."""
    requests, window = len(kv_seq_lens), config.sliding_window
    ratios = {source: config.compress_ratios[source] for source in config.kv_source_layer_ids}
    compresses = {
        source: state_block_tables[source][:, 0] >= 0 if ratio > 1 else np.ones(requests, dtype=bool)
        for source, ratio in ratios.items()
    }
    if checks:
        _check(config, query_start_loc, kv_seq_lens, window_block_table, compressed_block_tables, state_block_tables)

    parts: dict[tuple[str, int | None], list[Array]] = {}

    def add(name: str, values: Any, source: int | None = None) -> None:
        parts.setdefault((name, source), []).append(np.asarray(values))

    for request in range(requests):
        start, stop = int(query_start_loc[request]), int(query_start_loc[request + 1])
        stored = int(kv_seq_lens[request])
        length, positions = stored + stop - start, np.arange(stored, stored + stop - start)
        add("query_lens", [stop - start])
        add("new_kv_seq_lens", [length])
        add("logit_row_indices", [stop - 1 if stop > start else -1])
        add("token_to_req_indices", np.full(len(positions), request))
        add("position_ids", positions)
        add("window_slots", _rows(window_block_table[request], positions))
        seen = positions[:, None] - np.minimum(positions, window - 1)[:, None] + np.arange(window)
        live = seen <= positions[:, None]
        add("window_indices", np.where(live, _rows(window_block_table[request], np.where(live, seen, stored)), -1))
        add("window_lens", np.minimum(positions + 1, window))
        for source, ratio in ratios.items():
            enabled = bool(compresses[source][request])
            closing = positions[(positions + 1) % ratio == 0] if enabled else positions[:0]
            closed_rows, rope = np.full(len(positions), -1), np.full(len(positions), -1)
            closed_rows[closing - stored] = _rows(compressed_block_tables[ratio][request], closing // ratio)
            rope[closing - stored] = closing - ratio + 1
            add("compressed_slots", closed_rows, source)
            add("compressed_rope_position_ids", rope, source)
            add("compressed_lens", (positions + 1) // ratio * enabled, source)
            add("compressed_seq_lens", [length // ratio * enabled], source)
            add("compressed_seq_remainders", [length % ratio * enabled], source)
            add("compressor_source_token_indices", closing - stored + start, source)
            add("compressor_position_ids", closing - ratio + 1, source)

    def joined(name: str, source: int | None = None, dtype: type = np.int32) -> Array:
        return np.concatenate(parts[name, source]).astype(dtype)

    slots = {source: joined("compressed_slots", source, np.int64) for source in ratios}
    counts = {source: [len(part) for part in parts["compressor_position_ids", source]] for source in ratios}
    fields: dict[str, Any] = {
        "query_start_loc": query_start_loc.astype(np.int32),
        "dp_group_start_loc": np.array([0, requests], dtype=np.int32),
        "kv_seq_lens": kv_seq_lens.astype(np.int32),
        "window_slots": joined("window_slots", dtype=np.int64),
        "compressed_slots": slots,
        "index_slots": slots,
        "state_block_tables": {s: table.astype(np.int32) for s, table in state_block_tables.items()},
        "compressed_block_tables": {s: compressed_block_tables[r].astype(np.int32) for s, r in ratios.items()},
        "compressor_output_start_loc": {s: np.cumsum([0, *lens]).astype(np.int32) for s, lens in counts.items()},
    }
    for name, of_source in parts:
        if name not in fields:
            fields[name] = joined(name) if of_source is None else {s: joined(name, s) for s in ratios}
    return ForwardMetadata(**fields)


def _rows(table: Array, row: Array) -> Array:
    rows: Array = table[row // BLOCK_ROWS] * np.int64(BLOCK_ROWS) + row % BLOCK_ROWS
    return rows


def _check(
    config: ModelConfig,
    query_start_loc: Array,
    kv_seq_lens: Array,
    window_block_table: Array,
    compressed_block_tables: Mapping[int, Array],
    state_block_tables: Mapping[int, Array],
) -> None:
    """Pages present, written by one request alone, and state blocks distinct; requests with rows only."""
    units = [(window_block_table, 1, config.sliding_window - 1)]
    units += [(table, ratio, config.max_position_embeddings) for ratio, table in compressed_block_tables.items()]
    for table, ratio, reach in units:
        live: list[set[int]] = []
        written: list[set[int]] = []
        for request, stored in enumerate(kv_seq_lens.tolist()):
            stop = (stored + int(query_start_loc[request + 1] - query_start_loc[request])) // ratio
            first = max(0, stored - reach) // ratio // BLOCK_ROWS
            pages = table[request, first : -(-stop // BLOCK_ROWS)].tolist()
            if -1 in pages:
                raise MetadataError(f"request {request}", -1, "a physical block")
            live.append(set(pages))
            written.append(set(pages[stored // ratio // BLOCK_ROWS - first :]))
        for request, blocks in enumerate(written):
            for other, used in enumerate(live):
                if other != request and not blocks.isdisjoint(used):
                    raise MetadataError(f"request {request}", other, "blocks of its own")
    for source, table in state_block_tables.items():
        blocks_of = [block for block in table[:, 0].tolist() if block >= 0]
        if len(set(blocks_of)) != len(blocks_of):
            raise MetadataError(f"source {source}", blocks_of, "state blocks of one request each")
