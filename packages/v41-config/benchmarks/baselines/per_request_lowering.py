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

    per_request: dict[str, list[Array]] = {}
    per_source: dict[str, dict[int, list[Array]]] = {}

    def add(name: str, values: Any, source: int | None = None) -> None:
        parts = per_request if source is None else per_source.setdefault(name, {})
        parts.setdefault(name if source is None else source, []).append(np.asarray(values))  # type: ignore[call-overload]

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
            slots, rope = np.full(len(positions), -1), np.full(len(positions), -1)
            slots[closing - stored] = _rows(compressed_block_tables[ratio][request], closing // ratio)
            rope[closing - stored] = closing - ratio + 1
            add("compressed_slots", slots, source)
            add("compressed_rope_position_ids", rope, source)
            add("compressed_lens", (positions + 1) // ratio * enabled, source)
            add("compressed_seq_lens", [length // ratio * enabled], source)
            add("compressed_seq_remainders", [length % ratio * enabled], source)
            add("compressor_source_token_indices", closing - stored + start, source)
            add("compressor_position_ids", closing - ratio + 1, source)

    def joined(parts: list[Array], dtype: type = np.int32) -> Array:
        return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype=dtype)

    fields: dict[str, Any] = {name: joined(parts) for name, parts in per_request.items()}
    for name, parts in per_source.items():
        fields[name] = {source: joined(values) for source, values in parts.items()}
    fields["window_slots"] = joined(per_request["window_slots"], np.int64)
    slots_of = {source: joined(values, np.int64) for source, values in per_source["compressed_slots"].items()}
    counts = {s: [len(part) for part in parts] for s, parts in per_source["compressor_position_ids"].items()}
    return ForwardMetadata(
        **{
            **fields,
            "query_start_loc": query_start_loc.astype(np.int32),
            "dp_group_start_loc": np.array([0, requests], dtype=np.int32),
            "kv_seq_lens": kv_seq_lens.astype(np.int32),
            "compressed_slots": slots_of,
            "index_slots": slots_of,
            "state_block_tables": {s: table.astype(np.int32) for s, table in state_block_tables.items()},
            "compressed_block_tables": {s: compressed_block_tables[r].astype(np.int32) for s, r in ratios.items()},
            "compressor_output_start_loc": {
                source: np.cumsum([0, *lens]).astype(np.int32) for source, lens in counts.items()
            },
        }
    )


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
