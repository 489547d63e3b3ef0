"""The compressor: pairs across chunk borders, and a state ring that belongs to a request."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from v41_config import STATE_CAPACITY, TINY, ForwardMetadata, ModelConfig, build_forward_metadata
from v41_goldens import Capture, LayerWeights, ReferenceEngine, rope_tables
from v41_goldens.attention_stages import publish_compressed
from v41_goldens.compressor import CompressorRows, compress_ratio_1, compress_ratio_2, pool_pairs
from v41_goldens.errors import WeightError
from v41_goldens.indexer import index_keys
from v41_goldens.judges import assert_equal_bits, unequal_bits
from v41_goldens.quantisers import (
    dequantize_compressed_kv,
    dequantize_index,
    quantize_compressed_kv,
    quantize_index,
)
from v41_goldens.rope import apply_rope
from v41_goldens.weights import CompressorWeights

SOURCE = 2  # a KV source of ratio 2
POISON = math.nan
PROMPT = 13


@pytest.fixture(scope="module")
def weights(make_layer: Callable[[ModelConfig, int, int], LayerWeights]) -> CompressorWeights:
    found = make_layer(TINY, SOURCE, 1).attention.compressor
    assert found is not None
    return found


def tokens_of(request: int, count: int = PROMPT) -> Tensor:
    return torch.randn(count, TINY.hidden_size, generator=torch.Generator().manual_seed(request)).bfloat16()


def metadata_of(stored: Sequence[int], new: Sequence[int], blocks: Sequence[int]) -> ForwardMetadata[Tensor]:
    """A step of requests with `stored` tokens each that advance by `new`; `blocks` are their state blocks."""
    pages = np.arange(len(stored)).reshape(-1, 1)
    return build_forward_metadata(
        TINY,
        np.concatenate([[0], np.cumsum(new, dtype=np.int64)]),
        np.asarray(stored, dtype=np.int64),
        pages,
        {1: pages, 2: pages},
        {source: np.asarray(blocks, dtype=np.int64).reshape(-1, 1) for source in (2, 4)},
    ).to_torch()


class Requests:
    """Requests with a state block each, advanced in batches; `latents[r]` collects what request r publishes."""

    def __init__(self, weights: CompressorWeights, blocks: Sequence[int], pool: int) -> None:
        self.weights, self.blocks = weights, list(blocks)
        self.state = torch.full((pool, STATE_CAPACITY, 2 * TINY.head_dim), POISON)
        self.stored = [0] * len(blocks)
        self.latents: list[list[Tensor]] = [[] for _ in blocks]

    def step(self, batch: Sequence[tuple[int, Tensor]]) -> None:
        ids = [request for request, _ in batch]
        new = [len(rows) for _, rows in batch]
        meta = metadata_of([self.stored[i] for i in ids], new, [self.blocks[i] for i in ids])
        x = torch.cat([rows for _, rows in batch])
        out = compress_ratio_2(x, self.weights, CompressorRows.of(meta, SOURCE), self.state, TINY)
        starts = meta.compressor_output_start_loc[SOURCE].tolist()
        for row, request in enumerate(ids):
            self.latents[request].append(out[starts[row] : starts[row + 1]])
            self.stored[request] += new[row]

    def published(self, request: int) -> Tensor:
        return torch.cat(self.latents[request])


def alone(weights: CompressorWeights, tokens: Tensor) -> Tensor:
    """One request, one step."""
    requests = Requests(weights, [0], 1)
    requests.step([(0, tokens)])
    return requests.published(0)


def slow_latents(x: Tensor, weights: CompressorWeights) -> Tensor:
    """Pair by pair and channel by channel from the definition, in NumPy."""
    assert weights.wgate is not None
    wide = x.double().numpy()
    kv = (wide @ weights.wkv.double().numpy().T).astype(np.float32)
    gate = (wide @ weights.wgate.double().numpy().T).astype(np.float32)
    norm, latents = weights.norm.float().numpy(), []
    for even in range(0, len(x) - 1, 2):
        pair = slice(even, even + 2)
        e = np.exp((gate[pair] - gate[pair].max(0)).astype(np.float64)).astype(np.float32)
        weight = e / e.sum(0, dtype=np.float64).astype(np.float32)
        pooled = (weight * kv[pair]).sum(0, dtype=np.float64).astype(np.float32)
        rounded = torch.from_numpy(pooled).bfloat16().float().numpy()
        mean = (rounded * rounded).mean(dtype=np.float64).astype(np.float32)
        scale = np.float32(1 / np.sqrt(np.float64(mean + np.float32(TINY.rms_norm_eps))))
        latents.append(torch.from_numpy(rounded * scale * norm).bfloat16())
    return torch.stack(latents)


def test_one_shot_follows_the_definition(weights: CompressorWeights) -> None:
    tokens = tokens_of(0)
    assert_equal_bits(alone(weights, tokens), slow_latents(tokens, weights), "latents")


def test_every_split_equals_one_shot(weights: CompressorWeights) -> None:
    """All 4,096 ways to cut 13 tokens into chunks, as that many requests in one ragged batch per step."""
    tokens = tokens_of(0)
    cuts = [[0, *(p for p in range(1, PROMPT) if mask >> (p - 1) & 1), PROMPT] for mask in range(1 << (PROMPT - 1))]
    assert len({tuple(cut) for cut in cuts}) == 4096
    blocks = np.random.default_rng(0).permutation(len(cuts)).tolist()
    requests = Requests(weights, blocks, len(cuts))
    for step in range(PROMPT):
        chunks = [tokens[slice(*cut[step : step + 2])] if step + 1 < len(cut) else tokens[:0] for cut in cuts]
        requests.step(list(enumerate(chunks)))
    expected = alone(weights, tokens)
    for request, cut in enumerate(cuts):
        assert_equal_bits(requests.published(request), expected, f"split at {cut}")


def test_state_belongs_to_the_request(weights: CompressorWeights) -> None:
    """A and B interleave, A leaves, C takes A's batch row and then A's state block; the rows permute at every step."""
    a, b, c = (tokens_of(request, 21) for request in (1, 2, 3))
    requests = Requests(weights, [2, 0, 2], 4)
    requests.step([(0, a[:3]), (1, b[:1])])
    requests.step([(1, b[1:2]), (0, a[3:4])])
    requests.step([(0, a[4:9]), (1, b[2:5])])
    before = requests.state[2].clone()
    requests.step([(2, c[:1]), (1, b[5:6])])
    assert unequal_bits(requests.state[2], before).any(), "C took over the block in which A left an open pair"
    for at in range(1, 20, 3):
        rows = [(2, c[at : at + 3]), (1, b[requests.stored[1] :][:1])]
        requests.step(rows if at % 2 else rows[::-1])
    for request, tokens in ((0, a), (1, b), (2, c)):
        expected = alone(weights, tokens[: requests.stored[request]])
        assert_equal_bits(requests.published(request), expected, f"request {request}")
    assert requests.stored == [9, 13, 21]
    assert requests.state[[1, 3]].isnan().all(), "blocks that nobody owns"


def test_every_order_of_three_requests(weights: CompressorWeights) -> None:
    """Each step puts A, B and C into another order of batch rows."""
    tokens = [tokens_of(request, 18) for request in range(3)]
    requests = Requests(weights, [1, 2, 0], 3)
    position = 0
    for order in itertools.permutations(range(3)):
        requests.step([(request, tokens[request][position : position + 3]) for request in order])
        position += 3
    for request in range(3):
        assert_equal_bits(requests.published(request), alone(weights, tokens[request]), f"request {request}")


def test_a_ring_that_belongs_to_the_batch_row_is_seen(weights: CompressorWeights) -> None:
    """The same schedule with the state looked up by batch row gives other latents."""
    tokens = [tokens_of(request, 6) for request in range(2)]
    right, wrong = Requests(weights, [0, 1], 2), Requests(weights, [0, 1], 2)
    for position, order in ((0, (0, 1)), (3, (1, 0))):
        batch = [(request, tokens[request][position : position + 3]) for request in order]
        wrong.blocks = [order.index(request) for request in range(2)]
        right.step(batch)
        wrong.step(batch)
    assert not unequal_bits(right.published(0), alone(weights, tokens[0])).any()
    assert unequal_bits(wrong.published(0), right.published(0)).any(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 13])
@pytest.mark.parametrize("stored", [0, 1, 2, 3])
def test_the_ring_holds_the_last_tokens(weights: CompressorWeights, stored: int, count: int) -> None:
    """Also after a chunk longer than the ring: slot `position % 4`, and only as many slots as there were tokens."""
    assert weights.wgate is not None
    requests = Requests(weights, [1], 2)
    tokens = tokens_of(0, stored + count)
    if stored:
        requests.step([(0, tokens[:stored])])
    old = requests.state.clone()
    requests.step([(0, tokens[stored:])])
    wide = tokens.double()
    projected = torch.cat([wide @ weights.wkv.double().T, wide @ weights.wgate.double().T], dim=1).float()
    expected = old
    for position in range(stored + max(0, count - STATE_CAPACITY), stored + count):
        expected[1, position % STATE_CAPACITY] = projected[position]
    assert torch.equal(requests.state.nan_to_num(9e9), expected.nan_to_num(9e9))


def test_a_disabled_request_writes_and_publishes_nothing(weights: CompressorWeights) -> None:
    meta = metadata_of([0, 1], [4, 4], [-1, 1])
    state = torch.full((3, STATE_CAPACITY, 2 * TINY.head_dim), POISON)
    state[1, 0] = 1.0
    x = torch.cat([tokens_of(0, 4), tokens_of(1, 4)])
    out = compress_ratio_2(x, weights, CompressorRows.of(meta, SOURCE), state, TINY)
    assert meta.compressor_output_start_loc[SOURCE].tolist() == [0, 0, 2]
    assert out.shape == (2, TINY.head_dim)
    assert out.isfinite().all()
    assert state[1].isfinite().all()
    assert state[[0, 2]].isnan().all(), "a block of -1 is not the last block"


def test_a_step_without_tokens(weights: CompressorWeights) -> None:
    state = torch.full((1, STATE_CAPACITY, 2 * TINY.head_dim), POISON)
    for meta in (metadata_of([], [], []), metadata_of([5], [0], [0])):
        out = compress_ratio_2(tokens_of(0, 0), weights, CompressorRows.of(meta, SOURCE), state, TINY)
        assert out.shape == (0, TINY.head_dim)
        assert state.isnan().all()


@pytest.mark.parametrize(("source", "ratio"), [(2, 2), (4, 2), (6, 1)])
def test_rows_are_published_where_a_group_closes(
    make_layer: Callable[[ModelConfig, int, int], LayerWeights], source: int, ratio: int
) -> None:
    """Token by token: after position p the pools hold exactly the first (p + 1) // ratio rows, the rest is poison."""
    engine = ReferenceEngine(TINY, None, 2, 16, fill_byte=0xFF, shuffle_seed=2)
    attention = make_layer(TINY, source, 1).attention
    for position in range(12):
        ctx = engine.context([1], [1])
        publish_compressed(ctx, TINY.layer_config(source), attention, tokens_of(0)[position : position + 1])
        block = ctx.metadata.compressed_block_tables[source][0, 0]
        for cache in (engine.caches.compressed[source], engine.caches.index_key[source]):
            written = ~cache.scale.float().isnan().all(dim=-1).squeeze(-1)
            assert written[block].nonzero().flatten().tolist() == list(range((position + 1) // ratio))
            assert not written[1 - block].any()


@pytest.mark.parametrize(("source", "ratio"), [(2, 2), (6, 1)])
def test_what_is_published_is_rotated_at_the_first_position_of_its_group(
    make_layer: Callable[[ModelConfig, int, int], LayerWeights], source: int, ratio: int
) -> None:
    """After an odd start: the KV of each latent, and the index key of the latent before it is rotated."""
    engine = ReferenceEngine(TINY, None, 1, 32, fill_byte=0xFF)
    attention, tables = make_layer(TINY, source, 1).attention, rope_tables(TINY, 64)["compressed"]
    assert attention.index_keys is not None
    for start, stop in ((0, 5), (5, PROMPT)):
        ctx = engine.context([0], [stop - start], Capture())
        publish_compressed(ctx, TINY.layer_config(source), attention, tokens_of(0)[start:stop])
        assert ctx.capture is not None
        latent, keys = (ctx.capture.tensors[f"layer.{source:02d}.{name}"] for name in ("compressed_latent", "index_k"))
        entries = torch.arange(start // ratio, stop // ratio)
        cos, sin = (table[entries * ratio] for table in tables)
        stored = engine.caches.compressed[source].read(entries)
        right = dequantize_compressed_kv(quantize_compressed_kv(apply_rope(latent, cos, sin)))
        assert_equal_bits(stored, right, "compressed KV")
        right = dequantize_index(quantize_index(index_keys(latent, attention.index_keys, cos, sin, TINY)))
        assert_equal_bits(keys, right, "index keys, recorded")
        assert_equal_bits(engine.caches.index_key[source].read(entries), right, "index keys")

        after_rotation = index_keys(apply_rope(latent, cos, sin), attention.index_keys, cos, sin, TINY)
        assert unequal_bits(dequantize_index(quantize_index(after_rotation)), keys).any(), "keys of rotated latents"
        late_cos, late_sin = (table[entries * ratio + 1] for table in tables)
        late = dequantize_compressed_kv(quantize_compressed_kv(apply_rope(latent, late_cos, late_sin)))
        assert unequal_bits(late, stored).any(), "next position"


@pytest.mark.parametrize(("start", "count", "groups"), [(5, 4, [4, 6]), (4, 3, [4]), (3, 3, [2, 4]), (7, 1, [6])])
def test_a_group_is_rotated_at_its_first_position(start: int, count: int, groups: list[int]) -> None:
    meta = metadata_of([start], [count], [0])
    assert meta.compressor_position_ids[SOURCE].tolist() == groups
    closing = meta.compressor_source_token_indices[SOURCE]
    assert meta.compressed_rope_position_ids[SOURCE][closing].tolist() == groups
    assert [start + int(row) - 1 for row in closing] == groups


def test_ratio_1_is_one_latent_per_token(
    make_layer: Callable[[ModelConfig, int, int], LayerWeights],
) -> None:
    found = make_layer(TINY, 6, 1).attention.compressor
    assert found is not None
    assert found.wgate is None
    x = tokens_of(0)
    projected = (x.double() @ found.wkv.double().T).float().bfloat16().float()
    mean = (projected * projected).double().mean(1, keepdim=True).float() + torch.tensor(TINY.rms_norm_eps)
    expected = (projected * mean.double().rsqrt().float() * found.norm.float()).bfloat16()
    assert_equal_bits(compress_ratio_1(x, found, TINY), expected, "latents")
    with pytest.raises(WeightError, match="wgate"):
        compress_ratio_2(x, found, CompressorRows.of(metadata_of([0], [PROMPT], [0]), SOURCE), torch.empty(1), TINY)


def test_wrong_pooling_is_seen(weights: CompressorWeights) -> None:
    assert weights.wgate is not None
    tokens = tokens_of(0, 40)
    right = alone(weights, tokens)
    projected = torch.cat([tokens.double() @ w.double().T for w in (weights.wkv, weights.wgate)], dim=1).float()
    pairs = projected.unflatten(0, (-1, 2))
    assert_equal_bits(pool_pairs(pairs, weights.norm, TINY), right, "pairs")
    kv, gate = pairs.chunk(2, dim=-1)
    wrong = {
        "next pair": pool_pairs(projected[1:-1].unflatten(0, (-1, 2)), weights.norm, TINY),
        "gate and KV swapped": pool_pairs(torch.cat([gate, kv], dim=-1), weights.norm, TINY),
        "tokens swapped in the gate": pool_pairs(torch.cat([kv, gate.flip(1)], dim=-1), weights.norm, TINY),
        "mean": pool_pairs(torch.cat([kv, torch.zeros_like(gate)], dim=-1), weights.norm, TINY),
        "one gate for all channels": pool_pairs(
            torch.cat([kv, gate.mean(-1, keepdim=True).expand_as(gate)], dim=-1), weights.norm, TINY
        ),
        "state in BF16": pool_pairs(pairs.bfloat16().float(), weights.norm, TINY),
        "no gate": alone(dataclasses.replace(weights, wgate=torch.zeros_like(weights.wgate)), tokens),
    }
    for name, latents in wrong.items():
        count = min(len(latents), len(right))
        assert unequal_bits(latents[:count], right[:count]).any(), name
