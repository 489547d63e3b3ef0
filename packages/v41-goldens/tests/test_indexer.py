"""The indexer: scores by definition, selections by a slow sort, whatever the tiles, the budget and the batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from v41_config import BLOCK_ROWS, TINY, LayerConfig, ModelConfig
from v41_goldens import Capture, ForwardContext, LayerWeights, ReferenceEngine, indexer, rope_tables
from v41_goldens.attention_stages import publish_selection
from v41_goldens.errors import OperandError, WeightError
from v41_goldens.indexer import IndexQueries, index_keys, index_queries, index_scores, select_entries
from v41_goldens.judges import assert_equal_bits, unequal_bits
from v41_goldens.linear import quantized_linear
from v41_goldens.quantisers import dequantize_index, quantize_index
from v41_goldens.rms_norm import rms_norm
from v41_goldens.rope import apply_rope

HEADS, DIM, TOPK = TINY.index_n_heads, TINY.index_head_dim, TINY.index_topk
C2A_FULL, C1A_FULL, C1A_REINDEX = TINY.layer_config(4), TINY.layer_config(6), TINY.layer_config(8)
SIZE, TOP = TINY.candidate_block_size, TINY.candidate_topk_blocks

Layers = Callable[[ModelConfig, int, int], LayerWeights]
Scores = Callable[[IndexQueries, Tensor], Tensor]


def random_bf16(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def random_queries(tokens: int, seed: int = 0) -> IndexQueries:
    q = dequantize_index(quantize_index(random_bf16(tokens, HEADS, DIM, seed=seed)))
    return IndexQueries(q, (random_bf16(tokens, HEADS, seed=seed + 1).float() / 16).bfloat16())


def keys_of(request: int, entries: int) -> Tensor:
    """A request's index keys as they are stored and read: any prefix of the same ones."""
    rows = [random_bf16(DIM, seed=1000 * request + entry) for entry in range(entries)]
    return dequantize_index(quantize_index(torch.stack(rows) if rows else torch.empty(0, DIM).bfloat16()))


class Batch:
    """Requests with `stored` tokens and `new` more, and random keys published for every entry they have then.

    The keys depend on a request's name, counted from `first_name`, and on nothing else.
    """

    def __init__(self, stored: Sequence[int], new: Sequence[int], budget: int = 1 << 29, first_name: int = 0) -> None:
        requests = list(range(len(stored)))[::-1]  # request ids are not batch rows
        longest = max([s + n for s, n in zip(stored, new, strict=True)], default=0)
        self.engine = ReferenceEngine(
            TINY, None, max(1, len(stored)), max(1, longest), fill_byte=0xFF, shuffle_seed=1, max_logits_bytes=budget
        )
        self.engine.lengths[requests] = stored
        self.ctx = self.engine.context(requests, new, Capture())
        self.stored, self.new, self.first_name = stored, new, first_name

    def publish(self, layer: LayerConfig, change: Callable[[int, Tensor], Tensor] = lambda _, keys: keys) -> None:
        source = layer.kv_source
        assert source is not None
        table = self.ctx.metadata.compressed_block_tables[source].long()
        for request, (stored, new) in enumerate(zip(self.stored, self.new, strict=True)):
            entry = torch.arange((stored + new) // layer.compress_ratio)
            rows = table[request, entry // BLOCK_ROWS] * BLOCK_ROWS + entry % BLOCK_ROWS
            keys = change(request, keys_of(self.first_name + request, len(entry)))
            self.ctx.caches.index_key[source].publish(rows, quantize_index(keys))

    def slow_scores(self, layer: LayerConfig, queries: IndexQueries) -> list[list[float]]:
        """Per token the scores of the entries visible to it, one query at a time."""
        scores, token = [], 0
        for request, (stored, new) in enumerate(zip(self.stored, self.new, strict=True)):
            keys = keys_of(self.first_name + request, (stored + new) // layer.compress_ratio)
            for position in range(stored, stored + new):
                visible = (position + 1) // layer.compress_ratio
                one = IndexQueries(queries.q[[token]], queries.weights[[token]])
                scores.append(index_scores(one, keys)[0, :visible].tolist())
                token += 1
        return scores


def slow_selection(scores: list[float], allowed: Sequence[int] | None = None) -> list[int]:
    entries = range(len(scores)) if allowed is None else [j for j in allowed if j < len(scores)]
    best = sorted(sorted(entries, key=lambda j: (-scores[j], j))[:TOPK])
    return best + [-1] * (TOPK - len(best))


def slow_candidates(scores: list[float]) -> list[int]:
    """Entries of the kept blocks."""
    blocks = {start // SIZE: max(scores[start : start + SIZE]) for start in range(0, len(scores), SIZE)}
    if scores:
        blocks[(len(scores) - 1) // SIZE] = math.inf
    kept = sorted(blocks, key=lambda block: (-blocks[block], block))[:TOP]
    return sorted(SIZE * block + offset for block in kept for offset in range(SIZE))


RAGGED = ([0, 33, 200, 7, 150, 90], [70, 1, 1, 0, 80, 5])


# Scores, queries and keys


def slow_score(q: Tensor, weights: Tensor, key: Tensor) -> float:
    """One query, one key, head by head."""
    parts = []
    for head in range(HEADS):
        product = (q[head].double() @ key.double()).float().bfloat16().relu()
        parts.append((product.float() * weights[head].float()).bfloat16().double())
    return float(torch.stack(parts).sum().float().bfloat16())


def test_scores_follow_the_definition() -> None:
    queries, keys = random_queries(6), keys_of(0, 25)
    scores = index_scores(queries, keys)
    expected = [[slow_score(q, w, key) for key in keys] for q, w in zip(queries.q, queries.weights, strict=True)]
    assert_equal_bits(scores, torch.tensor(expected).bfloat16(), "scores")
    assert (queries.weights < 0).any(), "a head may count against a key"


def test_wrong_scores_differ() -> None:
    queries, keys = random_queries(20), keys_of(0, 25)
    right = index_scores(queries, keys)
    products = torch.einsum("thd,jd->thj", queries.q.double(), keys.double())
    w = queries.weights.double().unsqueeze(-1)
    wrong = {
        "no relu": (products * w).sum(1),
        "relu after the head weight": (products * w).relu().sum(1),
        "relu after the sum": (products * w).sum(1).relu(),
        "nothing rounded in between": (products.relu() * w).sum(1),
        "weights of the next head": (products.bfloat16().relu() * w.roll(1, dims=1)).bfloat16().double().sum(1),
        "sum in BF16": functools.reduce(
            torch.add, (products.bfloat16().relu() * queries.weights.unsqueeze(-1)).unbind(1)
        ),
    }
    for name, scores in wrong.items():
        assert unequal_bits(scores.float().bfloat16(), right).any(), name


def test_queries_follow_the_definition(make_layer: Layers) -> None:
    weights = make_layer(TINY, 4, 2).attention.indexer
    assert weights is not None
    qr, x = random_bf16(9, TINY.q_lora_rank, seed=1), random_bf16(9, TINY.hidden_size, seed=2)
    cos, sin = (table[[0, 1, 2, 3, 50, 51, 7, 7, 100]] for table in rope_tables(TINY, 101)["compressed"])
    queries = index_queries(qr, x, weights, cos, sin, TINY)
    q = apply_rope(quantized_linear(qr, weights.wq_b).unflatten(-1, (HEADS, DIM)), cos, sin)
    assert_equal_bits(queries.q, dequantize_index(quantize_index(q)), "q")
    projected = (x.double() @ weights.weights_proj.double().T).float().bfloat16()
    assert_equal_bits(queries.weights, (projected.float() * (DIM**-0.5 * HEADS**-0.5)).bfloat16(), "weights")

    unrotated = quantized_linear(qr, weights.wq_b).unflatten(-1, (HEADS, DIM))
    quantised_first = apply_rope(dequantize_index(quantize_index(unrotated)), cos, sin)
    assert unequal_bits(quantised_first, queries.q).any(), "quantised before the rotation"
    assert unequal_bits(q, queries.q).any(), "not quantised"


def test_keys_follow_the_definition(make_layer: Layers) -> None:
    weights = make_layer(TINY, 4, 2).attention.index_keys
    assert weights is not None
    latent = random_bf16(6, TINY.head_dim, seed=3)
    cos, sin = (table[0:12:2] for table in rope_tables(TINY, 12)["compressed"])
    projected = (latent.double() @ weights.wk.double().T).float().bfloat16()
    expected = apply_rope(rms_norm(projected, weights.k_norm, TINY.rms_norm_eps), cos, sin)
    assert_equal_bits(index_keys(latent, weights, cos, sin, TINY), expected, "keys")


# Selections


def select(batch: Batch, layer: LayerConfig, queries: IndexQueries) -> Tensor:
    selected = select_entries(batch.ctx, layer, queries)
    assert selected.shape == (sum(batch.new), TOPK)
    assert selected.dtype == torch.int32
    return selected


@pytest.mark.parametrize("layer", [C2A_FULL, C1A_FULL], ids=lambda layer: layer.mode.value)
def test_ragged_batches_select_as_a_slow_sort(layer: LayerConfig) -> None:
    batch = Batch(*RAGGED)
    batch.publish(layer)
    queries = random_queries(sum(batch.new))
    scores = batch.slow_scores(layer, queries)
    assert select(batch, layer, queries).tolist() == [slow_selection(row) for row in scores]
    assert batch.ctx.capture is not None
    recorded = batch.ctx.capture.tensors[f"layer.{layer.layer_id:02d}.index_score"]
    for token, row in enumerate(scores):
        assert recorded[token, : len(row)].tolist() == row
        assert (recorded[token, len(row) :] == -math.inf).all()


@pytest.mark.parametrize("ratio", [1, 2])
def test_visibility(ratio: int) -> None:
    """An entry is visible once its last token is there: every position of a prompt of 12, in one step and in steps."""
    layer = {1: C1A_FULL, 2: C2A_FULL}[ratio]
    for stored in range(12):
        batch = Batch([stored], [12 - stored])
        batch.publish(layer)
        selected = select(batch, layer, random_queries(12 - stored))
        for position, row in zip(range(stored, 12), selected.tolist(), strict=True):
            visible = [j for j in range(12) if (j + 1) * ratio <= position + 1]
            assert row == visible + [-1] * (TOPK - len(visible))


def test_candidates_restrict_the_layers_after_their_source() -> None:
    """Beyond 32 entries the kept blocks are fewer than there are: the restricted layer selects inside them only."""
    batch = Batch(*RAGGED)
    batch.publish(C1A_FULL)
    coarse, fine = random_queries(sum(batch.new), 10), random_queries(sum(batch.new), 20)
    coarse_scores, fine_scores = batch.slow_scores(C1A_FULL, coarse), batch.slow_scores(C1A_FULL, fine)

    own = select(batch, C1A_FULL, coarse)
    assert own.tolist() == [slow_selection(row) for row in coarse_scores], "the source restricts others, not itself"
    allowed = [slow_candidates(row) for row in coarse_scores]
    restricted = select(batch, C1A_REINDEX, fine)
    assert restricted.tolist() == [slow_selection(row, a) for row, a in zip(fine_scores, allowed, strict=True)]

    free = [slow_selection(row) for row in fine_scores]
    acted = [position for position, row in enumerate(restricted.tolist()) if row != free[position]]
    visible = [len(row) for row in fine_scores]
    assert len(acted) > 40
    assert all(visible[token] > TOP * SIZE for token in acted)

    assert batch.ctx.capture is not None
    mask = batch.ctx.capture.tensors["layer.06.candidate_mask"]
    for token, entries in enumerate(allowed):
        inside = [j for j in entries if j < mask.shape[1]]
        assert mask[token].nonzero().flatten().tolist() == inside


def test_an_injected_candidate_mask_takes_the_place_of_the_sources() -> None:
    stored, new = [150], [4]
    batch = Batch(stored, new)
    batch.publish(C1A_FULL)
    queries = random_queries(4)
    mask = torch.zeros(4, 154, dtype=torch.uint8)
    mask[:, 100:130] = 1
    batch.ctx.injected = {"layer.06.candidate_mask": mask}
    scores = batch.slow_scores(C1A_FULL, queries)
    expected = [slow_selection(row, range(100, 130)) for row in scores]
    assert select(batch, C1A_REINDEX, queries).tolist() == expected


def test_ties_select_the_lowest_entries() -> None:
    """A relu of nothing but negative products scores zero everywhere."""
    batch = Batch([100], [3])
    batch.publish(C1A_FULL, lambda _, keys: keys.abs())
    queries = random_queries(3)
    negative = IndexQueries(-queries.q.abs(), queries.weights)
    assert select(batch, C1A_FULL, negative).tolist() == [list(range(TOPK))] * 3


def test_a_needle_of_the_first_chunk_is_found_in_the_third() -> None:
    """Entry 3 alone points where the queries point; queries come 200 tokens later, in a step of their own."""
    needle = torch.ones(DIM).bfloat16()

    def hide(request: int, keys: Tensor) -> Tensor:
        keys = keys.clone()
        keys[3 if request == 1 else 77] = needle
        return keys

    batch = Batch([200, 200], [5, 5])
    batch.publish(C2A_FULL, hide)
    queries = IndexQueries(torch.ones(10, HEADS, DIM).bfloat16(), torch.ones(10, HEADS).bfloat16())
    selected = select(batch, C2A_FULL, queries)
    assert (selected[:5] == 77).sum(1).tolist() == [1] * 5
    assert (selected[5:] == 3).sum(1).tolist() == [1] * 5
    assert batch.ctx.capture is not None
    best = batch.ctx.capture.tensors["layer.04.index_score"].argmax(1)
    assert best.tolist() == [77] * 5 + [3] * 5, "the keys of the other request were not looked at"


# Tiles and budget


def selections(budget: int = 1 << 29, score: Scores = index_scores) -> dict[str, Tensor]:
    """Everything the indexer makes of one ragged batch in three layers."""
    batch = Batch(*RAGGED, budget=budget)
    for layer in (C2A_FULL, C1A_FULL):
        batch.publish(layer)
    found = {}
    for layer in (C2A_FULL, C1A_FULL, C1A_REINDEX):
        queries = random_queries(sum(batch.new), layer.layer_id)
        found[f"selection {layer.layer_id}"] = select_entries(batch.ctx, layer, queries, score)
    assert batch.ctx.capture is not None
    return found | batch.ctx.capture.tensors


@pytest.mark.parametrize("budget", [0, 1, 4_000, 10_000, 100_000, 1 << 20, 1 << 40])
def test_any_budget_gives_the_same_bits(budget: int) -> None:
    expected = selections()
    calls: list[tuple[int, int]] = []

    def watched(queries: IndexQueries, keys: Tensor) -> Tensor:
        scores = index_scores(queries, keys)
        calls.append((scores.numel() // max(1, scores.shape[-1]), scores.shape[-1]))
        return scores

    found = selections(budget, watched)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert_equal_bits(found[name], tensor, name)
    for rows, entries in calls:
        assert rows == 1 or rows * entries * HEADS * 8 <= budget, "one row always goes through, more only within budget"
    if budget == 0:
        assert len(calls) == 3 * sum(RAGGED[1])


@pytest.mark.parametrize(("rows", "keys"), [(1, 1 << 14), (3, 16), (64, 1), (7, 50), (1000, 128)])
def test_any_tile_gives_the_same_bits(rows: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = selections()
    monkeypatch.setattr(indexer, "_TILE_ROWS", rows)
    monkeypatch.setattr(indexer, "_KEY_TILE", keys)
    for name, tensor in selections().items():
        assert_equal_bits(tensor, expected[name], name)


def test_a_request_does_not_see_its_neighbours() -> None:
    """Each request of the ragged batch alone."""
    batch = Batch(*RAGGED)
    batch.publish(C2A_FULL)
    queries = random_queries(sum(batch.new))
    together, token = select(batch, C2A_FULL, queries), 0
    for request, (stored, new) in enumerate(zip(*RAGGED, strict=True)):
        rows = slice(token, token + new)
        token += new
        alone = Batch([stored], [new], first_name=request)
        alone.publish(C2A_FULL)
        found = select(alone, C2A_FULL, IndexQueries(queries.q[rows], queries.weights[rows]))
        assert_equal_bits(found, together[rows], f"request {request}")


@pytest.mark.parametrize(("stored", "new"), [([], []), ([0], [0]), ([40, 0, 90], [0, 0, 0])])
@pytest.mark.parametrize("layer", [C2A_FULL, C1A_FULL, C1A_REINDEX], ids=lambda layer: layer.mode.value)
def test_batches_without_tokens(stored: list[int], new: list[int], layer: LayerConfig) -> None:
    batch = Batch(stored, new)
    assert select(batch, layer, random_queries(0)).shape == (0, TOPK)


def test_a_first_token_has_nothing_to_select() -> None:
    batch = Batch([0, 0], [1, 1])
    assert (select(batch, C2A_FULL, random_queries(2)) == -1).all()


@pytest.mark.parametrize(
    ("layer", "entry", "token"),
    [(C2A_FULL, 0, 3), (C2A_FULL, 4, 4), (C1A_FULL, 0, 3), (C1A_FULL, 9, 4), (C1A_FULL, 10, 5)],
)
def test_a_visible_entry_without_a_number_is_refused(layer: LayerConfig, entry: int, token: int) -> None:
    """Free rows are NaN in every batch here; a row that a token sees is not free. `token` is the first to see it."""
    batch = Batch([0, 8], [3, 3])
    poisoned = functools.partial(torch.index_fill, dim=0, index=torch.tensor([entry]), value=math.nan)
    batch.publish(layer, lambda request, keys: poisoned(keys) if request else keys)
    with pytest.raises(OperandError, match=rf"layer.0{layer.layer_id}.index_score\[{token}\].*found a NaN"):
        select(batch, layer, random_queries(6))


# From selections to physical rows


def test_selected_entries_become_rows_of_their_request(make_layer: Layers) -> None:
    batch = Batch([200, 3], [2, 2])
    ctx, layer = batch.ctx, C2A_FULL
    batch.publish(layer)
    entries = torch.full((4, TOPK), -1, dtype=torch.int32)
    entries[0, :3] = torch.tensor([0, 98, 99])
    entries[1, :1] = 100
    entries[3, :2] = torch.tensor([0, 1])
    ctx.injected = {"layer.04.topk": entries}
    x, qr = random_bf16(4, TINY.hidden_size, seed=1), random_bf16(4, TINY.q_lora_rank, seed=2)
    publish_selection(ctx, layer, make_layer(TINY, 4, 2).attention.indexer, x, qr)
    table = ctx.metadata.compressed_block_tables[4]
    for token, request in enumerate([0, 0, 1, 1]):
        for column, entry in enumerate(entries[token].tolist()):
            row = -1 if entry < 0 else int(table[request, entry // BLOCK_ROWS]) * BLOCK_ROWS + entry % BLOCK_ROWS
            assert ctx.topk[4][token, column] == row


@pytest.mark.parametrize("entry", [2, 100, 2**31 - 1])
def test_an_injected_entry_that_is_not_visible_is_refused(make_layer: Layers, entry: int) -> None:
    batch = Batch([3], [2])
    batch.publish(C2A_FULL)
    ctx: ForwardContext = batch.ctx
    entries = torch.full((2, TOPK), -1, dtype=torch.int32)
    entries[0, 0] = entry
    entries[1, :2] = torch.tensor([0, 1])
    ctx.injected = {"layer.04.topk": entries}
    indexer_weights = make_layer(TINY, 4, 2).attention.indexer
    operands = random_bf16(2, TINY.hidden_size, seed=1), random_bf16(2, TINY.q_lora_rank, seed=2)
    with pytest.raises(OperandError, match=rf"layer.04.topk\[0\]: expected entries below 2.*found {entry}"):
        publish_selection(ctx, C2A_FULL, indexer_weights, *operands)
    ctx.injected = {"layer.04.topk": entries[1:]}
    with pytest.raises(OperandError, match="a row of entries for each token"):
        publish_selection(ctx, C2A_FULL, indexer_weights, *operands)
    assert ctx.topk == {}
    with pytest.raises(WeightError, match="indexer"):
        publish_selection(ctx, C2A_FULL, None, *operands)


def test_a_restricted_layer_needs_its_candidate_source() -> None:
    batch = Batch([40], [2])
    batch.publish(C1A_FULL)
    with pytest.raises(OperandError, match="candidate source to run before"):
        select_entries(batch.ctx, C1A_REINDEX, random_queries(2))
    with pytest.raises(OperandError, match="a mode with compressed KV"):
        select_entries(batch.ctx, TINY.layer_config(0), random_queries(2))
