"""`ForwardMetadata` against a slow lowering written from the contract in words, token by token.

The contract: tokens are packed request by request. A token at absolute position p publishes its window row at the
row of p in the request's window table and sees the last `sliding_window` positions up to p. A source of ratio r
closes a group at every r-th token: it publishes row p // r, which stands for r tokens, through the table of its
ratio, rotated as the group's first position; a token sees the rows whose last token is not after it. A request whose
compressor state block is -1 has no row there: it publishes none and sees none, those of earlier steps included.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from v41_config import FLASH, TINY, ForwardMetadata, ModelConfig, build_forward_metadata

Array = npt.NDArray[Any]
Metadata = ForwardMetadata[Array]
Table = list[list[int]]

PAGE = 128


def matrix(rows: Table) -> Array:
    """INT32 with two dimensions, also where there are no rows or no columns."""
    return np.array(rows, dtype=np.int32).reshape(len(rows), len(rows[0]) if rows else 0)


@dataclass
class Batch:
    """One step's arguments as plain lists."""

    config: ModelConfig
    query_lens: list[int]
    kv_seq_lens: list[int]
    window_table: Table
    ratio_tables: dict[int, Table]
    state_tables: dict[int, Table]

    def lower(self) -> Metadata:
        requests = len(self.query_lens)
        return build_forward_metadata(
            self.config,
            [sum(self.query_lens[:i]) for i in range(requests + 1)],
            self.kv_seq_lens,
            matrix(self.window_table),
            {ratio: matrix(table) for ratio, table in self.ratio_tables.items()},
            {source: matrix(table) for source, table in self.state_tables.items()},
        )

    def permuted(self, order: list[int]) -> Batch:
        def rows(values: list[Any]) -> list[Any]:
            return [values[i] for i in order]

        return Batch(
            self.config,
            rows(self.query_lens),
            rows(self.kv_seq_lens),
            rows(self.window_table),
            {ratio: rows(table) for ratio, table in self.ratio_tables.items()},
            {source: rows(table) for source, table in self.state_tables.items()},
        )


def kv_sources(config: ModelConfig) -> dict[int, int]:
    """KV source layer: its ratio."""
    return {source: config.compress_ratios[source] for source in config.kv_source_layer_ids}


def lower_slowly(batch: Batch) -> dict[str, Any]:
    """Every field of `ForwardMetadata` as nested lists."""
    config, window = batch.config, batch.config.sliding_window
    packed = [(r, stored + i) for r, stored in enumerate(batch.kv_seq_lens) for i in range(batch.query_lens[r])]
    new_lens = [stored + rows for stored, rows in zip(batch.kv_seq_lens, batch.query_lens, strict=True)]

    def physical(table: Table, request: int, row: int) -> int:
        return table[request][row // PAGE] * PAGE + row % PAGE

    starts, last_rows = [0], []
    for rows in batch.query_lens:
        starts.append(starts[-1] + rows)
        last_rows.append(starts[-1] - 1 if rows else -1)

    window_indices, window_lens = [], []
    for request, position in packed:
        seen = [physical(batch.window_table, request, p) for p in range(position + 1) if position - p < window]
        window_lens.append(len(seen))
        window_indices.append(seen + [-1] * (window - len(seen)))

    expected: dict[str, Any] = {
        "query_start_loc": starts,
        "dp_group_start_loc": [0, len(new_lens)],
        "query_lens": batch.query_lens,
        "logit_row_indices": last_rows,
        "token_to_req_indices": [request for request, _ in packed],
        "position_ids": [position for _, position in packed],
        "kv_seq_lens": batch.kv_seq_lens,
        "new_kv_seq_lens": new_lens,
        "window_slots": [physical(batch.window_table, request, position) for request, position in packed],
        "window_indices": window_indices,
        "window_lens": window_lens,
        "state_block_tables": batch.state_tables,
        "compressed_block_tables": {s: batch.ratio_tables[ratio] for s, ratio in kv_sources(config).items()},
    }
    for source, ratio in kv_sources(config).items():
        lowered = lower_source_slowly(batch, source, ratio, packed, new_lens)
        for name, values in lowered.items():
            expected.setdefault(name, {})[source] = values
    return expected


def lower_source_slowly(
    batch: Batch, source: int, ratio: int, packed: list[tuple[int, int]], new_lens: list[int]
) -> dict[str, list[int]]:
    table = batch.ratio_tables[ratio]
    disabled = [ratio == 2 and batch.state_tables[source][request][0] == -1 for request in range(len(new_lens))]
    slots, rope, visible = [], [], []
    closing_rows, group_starts, outputs = [], [], [0] * len(new_lens)
    for row, (request, position) in enumerate(packed):
        entries = [j for j in range(position + 1) if (j + 1) * ratio <= position + 1 and not disabled[request]]
        visible.append(len(entries))
        if position % ratio == ratio - 1 and not disabled[request]:
            slots.append(table[request][entries[-1] // PAGE] * PAGE + entries[-1] % PAGE)
            rope.append(entries[-1] * ratio)
            closing_rows.append(row)
            group_starts.append(entries[-1] * ratio)
            outputs[request] += 1
        else:
            slots.append(-1)
            rope.append(-1)
    return {
        "compressed_slots": slots,
        "index_slots": slots,
        "compressed_seq_lens": [0 if off else n // ratio for n, off in zip(new_lens, disabled, strict=True)],
        "compressed_seq_remainders": [0 if off else n % ratio for n, off in zip(new_lens, disabled, strict=True)],
        "compressed_lens": visible,
        "compressor_output_start_loc": [sum(outputs[:i]) for i in range(len(outputs) + 1)],
        "compressor_source_token_indices": closing_rows,
        "compressor_position_ids": group_starts,
        "compressed_rope_position_ids": rope,
    }


INT64_FIELDS = {"window_slots", "compressed_slots", "index_slots"}


def differences(metadata: Metadata, expected: dict[str, Any]) -> list[str]:
    """Names of the fields (with `[source]`) whose dtype, shape or values are not as expected."""
    different = sorted({f.name for f in dataclasses.fields(metadata)} ^ set(expected))
    for name, values in expected.items():
        found = getattr(metadata, name)
        pairs = {"": (found, values)}
        if isinstance(values, dict):
            if set(found) != set(values):
                different.append(name)
                continue
            pairs = {f"[{source}]": (found[source], values[source]) for source in values}
        for suffix, (array, lists) in pairs.items():
            dtype = np.int64 if name in INT64_FIELDS else np.int32
            wanted = np.array(lists, dtype=dtype)
            if not wanted.size and array.ndim == 2:  # lists without elements do not tell their columns
                wanted = wanted.reshape(len(lists), 0 if len(lists) else array.shape[1])
            if array.dtype != dtype or array.shape != wanted.shape or not np.array_equal(array, wanted):
                different.append(name + suffix)
    return different


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Ragged valid batches: prefill, chunks from any position, decode of 1 to 6 rows, requests without rows."""
    config = draw(st.sampled_from([TINY, FLASH]))
    page_ends = st.sampled_from([n + config.sliding_window * w for n in (127, 128, 256) for w in (0, 1)])
    stored_tokens = st.one_of(st.integers(0, 700), page_ends, page_ends.map(lambda n: n - 1))
    request = st.one_of(
        st.tuples(st.just(0), stored_tokens),
        st.tuples(st.integers(1, 300), st.just(0)),
        st.tuples(st.integers(1, 40), stored_tokens),
        st.tuples(st.integers(1, 6), stored_tokens),
    )
    requests = draw(st.lists(request, max_size=5))
    query_lens, stored = [rows for rows, _ in requests], [length for _, length in requests]
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def table(stop_rows: list[int], first_live: list[int], used: list[bool]) -> Table:
        """Distinct blocks in any order under live rows (or -1, where nothing runs); elsewhere old block numbers."""
        columns = -(-max(stop_rows, default=0) // PAGE) + int(random.integers(0, 2))
        blocks = random.permutation(len(requests) * columns + 7)
        result = []
        for r in range(len(requests)):
            row = []
            for page in range(columns):
                live = used[r] and first_live[r] < (page + 1) * PAGE and page * PAGE < stop_rows[r]
                block = blocks[r * columns + page] if live else random.choice([-1, int(random.integers(0, 9))])
                if live and not query_lens[r] and random.random() < 0.3:
                    block = -1
                row.append(int(block))
            result.append(row)
        return result

    new_lens = [length + rows for rows, length in requests]
    behind_window = [max(0, length - config.sliding_window + 1) for length in stored]
    state_tables: dict[int, Table] = {}
    for source, ratio in kv_sources(config).items():
        if ratio == 2:
            blocks = random.permutation(len(requests) + 3)
            blocks[random.random(len(blocks)) < 0.25] = -1
            state_tables[source] = [[int(blocks[r])] for r in range(len(requests))]
    compresses = {
        ratio: [ratio == 1 or any(table[r][0] >= 0 for table in state_tables.values()) for r in range(len(requests))]
        for ratio in (1, 2)
    }
    return Batch(
        config,
        query_lens,
        stored,
        table(new_lens, behind_window, [True] * len(requests)),
        {ratio: table([n // ratio for n in new_lens], [0] * len(requests), compresses[ratio]) for ratio in (1, 2)},
        state_tables,
    )


@settings(max_examples=120, deadline=None)
@given(batches())
def test_equals_the_slow_lowering(batch: Batch) -> None:
    assert differences(batch.lower(), lower_slowly(batch)) == []


def small_batch() -> Batch:
    """Three requests: rows 5..8, none, and a prefill of 2; blocks and states numbered out of order."""
    return Batch(
        TINY,
        query_lens=[4, 0, 2],
        kv_seq_lens=[5, 9, 0],
        window_table=[[3], [7], [1]],
        ratio_tables={1: [[2], [0], [5]], 2: [[4], [0], [6]]},
        state_tables={2: [[1], [0], [8]], 4: [[2], [9], [-1]]},
    )


def test_the_comparison_finds_one_changed_element_in_every_field() -> None:
    metadata, expected = small_batch().lower(), lower_slowly(small_batch())
    assert differences(metadata, expected) == []
    for field in dataclasses.fields(metadata):
        value = getattr(metadata, field.name)
        for source in value if isinstance(value, dict) else [None]:
            array = (value if source is None else value[source]).copy()
            array.flat[-1] += 1
            changes: dict[str, Any] = {field.name: array if source is None else {**value, source: array}}
            name = field.name if source is None else f"{field.name}[{source}]"
            assert differences(dataclasses.replace(metadata, **changes), expected) == [name]


def test_the_comparison_finds_another_dtype_and_shape() -> None:
    metadata, expected = small_batch().lower(), lower_slowly(small_batch())
    wide = dataclasses.replace(metadata, position_ids=metadata.position_ids.astype(np.int64))
    assert differences(wide, expected) == ["position_ids"]
    narrow = dataclasses.replace(metadata, window_slots=metadata.window_slots.astype(np.int32))
    assert differences(narrow, expected) == ["window_slots"]
    long = dataclasses.replace(metadata, query_lens=np.append(metadata.query_lens, np.int32(0)))
    assert differences(long, expected) == ["query_lens"]
    source_missing = dataclasses.replace(metadata, compressed_lens={2: metadata.compressed_lens[2]})
    assert differences(source_missing, expected) == ["compressed_lens"]


def test_slots_are_int64_and_everything_else_int32() -> None:
    metadata = small_batch().lower()
    for field in dataclasses.fields(metadata):
        value = getattr(metadata, field.name)
        for array in value.values() if isinstance(value, dict) else [value]:
            assert array.dtype == (np.int64 if field.name in INT64_FIELDS else np.int32), field.name
            assert array.flags.c_contiguous, field.name


def test_start_5_length_4_ratio_2_rotates_as_4_and_6() -> None:
    metadata = small_batch().lower()
    assert metadata.position_ids.tolist() == [5, 6, 7, 8, 0, 1]
    assert metadata.compressor_position_ids[2].tolist() == [4, 6, 0]
    assert metadata.compressed_rope_position_ids[2].tolist() == [4, -1, 6, -1, -1, 0]
    assert metadata.compressor_source_token_indices[2].tolist() == [0, 2, 5]
    assert metadata.compressor_output_start_loc[2].tolist() == [0, 2, 2, 3]
    assert metadata.compressed_slots[2].tolist() == [4 * 128 + 2, -1, 4 * 128 + 3, -1, -1, 6 * 128]
    # the third request has no state block at source 4, and publishes nothing there
    assert metadata.compressed_rope_position_ids[4].tolist() == [4, -1, 6, -1, -1, -1]
    assert metadata.compressor_output_start_loc[4].tolist() == [0, 2, 2, 2]
    assert metadata.compressed_slots[4].tolist() == [4 * 128 + 2, -1, 4 * 128 + 3, -1, -1, -1]
    assert metadata.compressed_lens[4].tolist() == [3, 3, 4, 4, 0, 0]
    # ratio 1 publishes every token
    assert metadata.compressed_rope_position_ids[6].tolist() == [5, 6, 7, 8, 0, 1]
    assert metadata.logit_row_indices.tolist() == [3, -1, 5]


@pytest.mark.parametrize("stored", range(6))
@pytest.mark.parametrize("rows", range(1, 7))
def test_ratio_2_publishes_exactly_at_odd_positions(stored: int, rows: int) -> None:
    batch = Batch(TINY, [rows], [stored], [[0]], {1: [[0]], 2: [[0]]}, {2: [[0]], 4: [[0]]})
    metadata = batch.lower()
    publishes = metadata.compressed_slots[2] >= 0
    assert publishes.tolist() == [position % 2 == 1 for position in range(stored, stored + rows)]
    assert metadata.compressed_seq_remainders[2].tolist() == [(stored + rows) % 2]
    assert (metadata.compressed_slots[6] >= 0).all()


VISIBLE_UP_TO_12 = {1: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], 2: [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6]}


def test_compressed_rows_are_visible_from_their_last_token_on() -> None:
    metadata = Batch(TINY, [12], [0], [[0]], {1: [[0]], 2: [[0]]}, {2: [[0]], 4: [[0]]}).lower()
    assert metadata.compressed_lens[6].tolist() == VISIBLE_UP_TO_12[1]
    assert metadata.compressed_lens[2].tolist() == VISIBLE_UP_TO_12[2]
    assert metadata.compressed_lens[4].tolist() == VISIBLE_UP_TO_12[2]


TOKEN_FIELDS = ("position_ids", "window_slots", "window_indices", "window_lens")
TOKEN_FIELDS_BY_SOURCE = ("compressed_slots", "index_slots", "compressed_lens", "compressed_rope_position_ids")


def token_rows(metadata: Metadata) -> list[Array]:
    """Every token-major field that must not depend on the other rows of the batch."""
    rows = [getattr(metadata, name) for name in TOKEN_FIELDS]
    for name in TOKEN_FIELDS_BY_SOURCE:
        rows += [array for _, array in sorted(getattr(metadata, name).items())]
    return rows


@pytest.mark.parametrize("split", range(1, 13))
def test_every_split_of_a_prompt_equals_one_shot(split: int) -> None:
    tables: dict[str, Any] = {
        "window_table": [[5]],
        "ratio_tables": {1: [[3]], 2: [[2]]},
        "state_tables": {2: [[1]], 4: [[0]]},
    }
    whole = token_rows(Batch(TINY, [13], [0], **tables).lower())
    first = token_rows(Batch(TINY, [split], [0], **tables).lower())
    second = token_rows(Batch(TINY, [13 - split], [split], **tables).lower())
    for one_shot, head, tail in zip(whole, first, second, strict=True):
        np.testing.assert_array_equal(one_shot, np.concatenate([head, tail]))


@settings(max_examples=40, deadline=None)
@given(batches(), st.data())
def test_batch_order_moves_rows_and_changes_none(batch: Batch, data: st.DataObject) -> None:
    requests = len(batch.query_lens)
    order = data.draw(st.permutations(range(requests)))
    metadata, permuted = batch.lower(), batch.permuted(order).lower()
    starts = metadata.query_start_loc
    moved = np.array([row for r in order for row in range(starts[r], starts[r + 1])], dtype=np.int64)
    for before, after in zip(token_rows(metadata), token_rows(permuted), strict=True):
        np.testing.assert_array_equal(before[moved], after)
    for source, table in metadata.state_block_tables.items():
        np.testing.assert_array_equal(table[order], permuted.state_block_tables[source])


@pytest.mark.parametrize("requests", [0, 3])
def test_a_step_without_tokens(requests: int) -> None:
    batch = Batch(
        TINY,
        query_lens=[0] * requests,
        kv_seq_lens=list(range(requests)),
        window_table=[[-1]] * requests,
        ratio_tables={1: [[-1]] * requests, 2: [[-1]] * requests},
        state_tables={2: [[-1]] * requests, 4: [[-1]] * requests},
    )
    metadata = batch.lower() if requests else build_forward_metadata(TINY, [0], [], [], {1: [], 2: []}, {2: [], 4: []})
    assert metadata.query_start_loc.tolist() == [0] * (requests + 1)
    assert metadata.logit_row_indices.tolist() == [-1] * requests
    assert metadata.window_indices.shape == (0, 16)
    assert metadata.window_slots.shape == (0,)
    assert metadata.state_block_tables[2].shape == (requests, 1)
    assert metadata.compressor_source_token_indices[2].shape == (0,)
    assert metadata.compressor_output_start_loc[6].tolist() == [0] * (requests + 1)
    assert metadata.compressed_seq_lens[6].tolist() == list(range(requests))
    assert metadata.compressed_seq_lens[2].tolist() == [0] * requests  # no state block, no compressed rows


def test_pages_need_no_columns_where_nothing_is_stored() -> None:
    """One token at ratio 2 closes no group: its table may have no column at all."""
    batch = Batch(TINY, [1], [0], [[4]], {1: [[9]], 2: [[]]}, {2: [[0]], 4: [[0]]})
    metadata = batch.lower()
    assert metadata.compressed_slots[2].tolist() == [-1]
    assert metadata.compressed_block_tables[2].shape == (1, 0)
    assert differences(metadata, lower_slowly(batch)) == []


def test_sources_of_one_ratio_share_equal_values() -> None:
    metadata = Batch(TINY, [2], [0], [[0]], {1: [[0]], 2: [[0]]}, {2: [[0]], 4: [[3]]}).lower()
    assert metadata.compressed_lens[2] is metadata.compressed_lens[4]
    assert metadata.compressed_slots[2] is metadata.compressed_slots[4]
    assert metadata.compressed_slots[2] is not metadata.compressed_slots[6]


def test_arguments_are_neither_changed_nor_kept() -> None:
    table = np.array([[3]], dtype=np.int32)
    metadata = build_forward_metadata(TINY, [0, 1], [0], table, {1: table, 2: table}, {2: table, 4: table})
    table[:] = 99
    assert metadata.window_slots.tolist() == [3 * 128]
    assert metadata.compressed_block_tables[6].tolist() == [[3]]
    assert metadata.state_block_tables[2].tolist() == [[3]]


def test_one_million_tokens_of_context_for_32_requests() -> None:
    """Decode of 6 rows each, ending at the last position there is; only the window's last pages are still there."""
    requests, rows, limit = 32, 6, FLASH.max_position_embeddings
    window_table = np.full((requests, limit // PAGE), -1)
    window_table[:, -2:] = np.arange(2 * requests).reshape(requests, 2)
    ratio_tables = {r: np.arange(requests * limit // (PAGE * r)).reshape(requests, -1)[::-1] for r in (1, 2)}
    state = np.arange(requests)[:, None]
    metadata = build_forward_metadata(
        FLASH,
        np.arange(requests + 1) * rows,
        np.full(requests, limit - rows),
        window_table,
        ratio_tables,
        {2: state, 8: state[::-1], 14: state + 100},
    )
    assert metadata.position_ids[-rows:].tolist() == list(range(limit - rows, limit))
    assert metadata.new_kv_seq_lens.tolist() == [limit] * requests
    assert metadata.window_slots[-1] == 63 * PAGE + 127
    # limit - 6 is row 122 of its page: its window starts at row 123 of the page before
    assert metadata.window_indices[-rows].tolist() == [62 * PAGE + 123 + i for i in range(128)]
    assert metadata.compressed_lens[20][-rows:].tolist() == list(range(limit - rows + 1, limit + 1))
    assert metadata.compressed_lens[2][-rows:].tolist() == [524285, 524286, 524286, 524287, 524287, 524288]
    # the last request's blocks are the first ones, as the tables were turned around
    assert metadata.compressed_slots[20][-1] == limit - 1
    assert metadata.compressed_slots[8][-1] == limit // 2 - 1
    assert metadata.compressed_slots[20][0] == 31 * limit + limit - rows


def test_the_last_physical_row_an_int32_can_hold() -> None:
    top = [[2**24 - 1]]
    metadata = build_forward_metadata(TINY, [0, 128], [0], top, {1: top, 2: top}, {2: [[0]], 4: [[0]]})
    assert metadata.window_slots[-1] == 2**31 - 1
    assert metadata.window_indices[-1, 15] == 2**31 - 1
    assert metadata.compressed_slots[6][-1] == 2**31 - 1


def test_to_torch_shares_memory_and_keeps_dtypes() -> None:
    torch = pytest.importorskip("torch")
    metadata = small_batch().lower()
    tensors = metadata.to_torch()
    for field in dataclasses.fields(metadata):
        arrays, converted = getattr(metadata, field.name), getattr(tensors, field.name)
        if not isinstance(arrays, dict):
            arrays, converted = {0: arrays}, {0: converted}
        assert list(arrays) == list(converted)
        for key, array in arrays.items():
            tensor = converted[key]
            assert tensor.dtype == (torch.int64 if field.name in INT64_FIELDS else torch.int32), field.name
            assert tensor.shape == array.shape
            assert tensor.data_ptr() == array.ctypes.data
            assert tensor.tolist() == array.tolist()
    metadata.position_ids[0] = 77
    assert tensors.position_ids[0] == 77
    assert tensors.compressed_block_tables[2] is tensors.compressed_block_tables[4]


def test_to_torch_on_another_device() -> None:
    pytest.importorskip("torch")
    tensors = small_batch().lower().to_torch("meta")
    assert tensors.position_ids.device.type == "meta"
    assert tensors.window_indices.shape == (6, 16)
    assert tensors.compressed_slots[4].device.type == "meta"
