"""The six attention modes: who publishes, who selects, who reads what."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from v41_config import TINY, AttentionMode, ModelConfig
from v41_goldens import (
    ATTENTION,
    ATTENTION_ENTRIES,
    Capture,
    ForwardContext,
    LayerWeights,
    ModelWeights,
    PagedCaches,
    ReferenceEngine,
)
from v41_goldens.errors import OperandError, WeightError
from v41_goldens.judges import assert_equal_bits, unequal_bits
from v41_goldens.sparse_attention import sparse_attention

TOKENS = 70
MODE_LAYERS = {layer.mode: layer.layer_id for layer in reversed(TINY.layers)}


def x(count: int = TOKENS, seed: int = 0) -> Tensor:
    return torch.randn(count, TINY.hidden_size, generator=torch.Generator().manual_seed(seed)).bfloat16()


def all_bytes(caches: PagedCaches) -> dict[str, Tensor]:
    found = {f"state {layer}": state.view(torch.uint8).clone() for layer, state in caches.state.items()}
    for kind in ("window", "compressed", "index_key"):
        for layer, cache in getattr(caches, kind).items():
            found[f"{kind} {layer}"] = cache.payload.view(torch.uint8).clone()
    return found


@pytest.fixture(scope="module")
def after_full(make_layer: Callable[[ModelConfig, int, int], LayerWeights]) -> Callable[[], ForwardContext]:
    """A context in which the three Full layers have run on the whole prompt."""

    def make() -> ForwardContext:
        engine = ReferenceEngine(TINY, None, 1, TOKENS, shuffle_seed=1, fill_byte=0xFF)
        ctx = engine.context([0], [TOKENS], Capture())
        for layer_id in TINY.kv_source_layer_ids:
            layer = TINY.layer_config(layer_id)
            ATTENTION[layer.mode](ctx, layer, make_layer(TINY, layer_id, 1).attention, x(seed=layer_id))
        return ctx

    return make


def test_every_mode_has_an_entry_for_both_phases() -> None:
    assert set(ATTENTION) == set(AttentionMode) == set(MODE_LAYERS)
    assert set(ATTENTION_ENTRIES) == {
        f"{phase}_attn_{mode.value}" for phase in ("prefill", "decode") for mode in AttentionMode
    }
    for mode, attention in ATTENTION.items():
        assert ATTENTION_ENTRIES[f"prefill_attn_{mode.value}"] is attention
        assert ATTENTION_ENTRIES[f"decode_attn_{mode.value}"] is attention, "one code path"


PUBLISHES = {
    AttentionMode.SWA: {"window"},
    AttentionMode.C2A_FULL: {"window", "compressed", "index_key", "state"},
    AttentionMode.C2A_REUSE: {"window"},
    AttentionMode.C1A_FULL: {"window", "compressed", "index_key"},
    AttentionMode.C1A_REINDEX: {"window"},
    AttentionMode.C1A_REUSE: {"window"},
}


@pytest.mark.parametrize("mode", AttentionMode, ids=lambda mode: mode.value)
def test_a_mode_publishes_into_its_own_pools_only(
    make_layer: Callable[[ModelConfig, int, int], LayerWeights],
    after_full: Callable[[], ForwardContext],
    mode: AttentionMode,
) -> None:
    ctx, layer = after_full(), TINY.layer_config(MODE_LAYERS[mode])
    before, selections = all_bytes(ctx.caches), set(ctx.topk)
    ctx.topk.pop(layer.layer_id, None)
    out = ATTENTION[mode](ctx, layer, make_layer(TINY, layer.layer_id, 9).attention, x(seed=9))
    assert out.dtype == torch.float32
    assert out.shape == (TOKENS, TINY.hidden_size)
    assert out.isfinite().all()
    changed = {name for name, stored in all_bytes(ctx.caches).items() if not torch.equal(stored, before[name])}
    assert changed == {f"{kind} {layer.layer_id}" for kind in PUBLISHES[mode]}
    assert set(ctx.topk) == selections | ({layer.layer_id} if layer.owns_index else set())


def test_output_is_the_sparse_attention_of_logical_entries(tiny_weights: ModelWeights) -> None:
    """Every layer of a paged, chunked run against lists built from the logical rows: window first, padded to its
    width, then the selected entries of the layer's source."""
    tokens = random.Random(2).choices(range(TINY.vocab_size), k=180)
    engine = ReferenceEngine(TINY, tiny_weights, 2, 180, shuffle_seed=5, fill_byte=0xFF)
    captures = []
    for start, stop in ((0, 97), (97, 98), (98, 180)):
        captures.append(Capture())
        engine.step([(1, tokens[start:stop])], captures[-1])

    def joined(layer_id: int, name: str) -> Tensor:
        return torch.cat([capture.tensors[f"layer.{layer_id:02d}.{name}"] for capture in captures])

    window = TINY.sliding_window
    position = torch.arange(180).unsqueeze(1)
    column = torch.arange(window)
    live = torch.minimum(position + 1, torch.tensor(window))
    seen = torch.where(column < live, position - live + 1 + column, -1)
    for layer in TINY.layers:
        kv, valid = joined(layer.layer_id, "window_kv")[seen], seen >= 0
        if layer.kv_source is not None and layer.index_source is not None:
            selected = joined(layer.index_source, "topk").long()
            kv = torch.cat([kv, joined(layer.kv_source, "compressed_kv")[selected]], dim=1)
            valid = torch.cat([valid, selected >= 0], dim=1)
        sink = tiny_weights.layers[layer.layer_id].attention.attn_sink
        q = joined(layer.layer_id, "q")
        expected = sparse_attention(q, kv, valid, sink, TINY.head_dim**-0.5)
        found = joined(layer.layer_id, "sparse_attn_out")
        assert_equal_bits(found, expected, f"layer {layer.layer_id}")

        late = sparse_attention(q, kv.roll(1, dims=0), valid, sink, TINY.head_dim**-0.5)
        assert unequal_bits(late, found).any(), "the previous token's list"
        if layer.kv_source is not None:
            alone = sparse_attention(q, kv[:, :window], valid[:, :window], sink, TINY.head_dim**-0.5)
            assert unequal_bits(alone, found).any(), "the window alone"


@pytest.mark.parametrize("mode", [AttentionMode.C2A_REUSE, AttentionMode.C1A_REUSE], ids=lambda mode: mode.value)
def test_reuse_reads_the_selection_of_its_source(
    make_layer: Callable[[ModelConfig, int, int], LayerWeights],
    after_full: Callable[[], ForwardContext],
    mode: AttentionMode,
) -> None:
    layer = next(layer for layer in TINY.layers if layer.mode is mode)
    assert layer.index_source is not None
    weights = make_layer(TINY, layer.layer_id, 9).attention
    right = ATTENTION[mode](after_full(), layer, weights, x(seed=9))
    ctx = after_full()
    ctx.topk[layer.index_source] = ctx.topk[layer.index_source].clone()
    ctx.topk[layer.index_source][50] = -1
    out = ATTENTION[mode](ctx, layer, weights, x(seed=9))
    assert unequal_bits(out, right).any(dim=1).nonzero().flatten().tolist() == [50]


MISSING = {
    AttentionMode.C2A_FULL: ("compressor", "index_keys", "indexer"),
    AttentionMode.C1A_FULL: ("compressor", "index_keys", "indexer"),
    AttentionMode.C1A_REINDEX: ("indexer",),
}


@pytest.mark.parametrize(("mode", "part"), [(mode, part) for mode, parts in MISSING.items() for part in parts], ids=str)
def test_weights_that_a_mode_needs_and_does_not_get(
    make_layer: Callable[[ModelConfig, int, int], LayerWeights],
    after_full: Callable[[], ForwardContext],
    mode: AttentionMode,
    part: str,
) -> None:
    layer = next(layer for layer in TINY.layers if layer.mode is mode)
    without: dict[str, Any] = {part: None}
    weights = dataclasses.replace(make_layer(TINY, layer.layer_id, 9).attention, **without)
    with pytest.raises(WeightError, match=f"layers.{layer.layer_id}.attn"):
        ATTENTION[mode](after_full(), layer, weights, x())


@pytest.mark.parametrize("mode", AttentionMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("count", [0, TOKENS - 1, TOKENS + 1])
def test_rows_that_are_not_those_of_the_batch_are_refused_before_any_write(
    make_layer: Callable[[ModelConfig, int, int], LayerWeights],
    after_full: Callable[[], ForwardContext],
    mode: AttentionMode,
    count: int,
) -> None:
    ctx, layer = after_full(), TINY.layer_config(MODE_LAYERS[mode])
    before = all_bytes(ctx.caches)
    with pytest.raises(OperandError, match="apply_rope"):
        ATTENTION[mode](ctx, layer, make_layer(TINY, layer.layer_id, 9).attention, x(count))
    assert all(torch.equal(stored, before[name]) for name, stored in all_bytes(ctx.caches).items())


def test_tensors_of_another_dtype_are_refused(
    make_layer: Callable[[ModelConfig, int, int], LayerWeights], after_full: Callable[[], ForwardContext]
) -> None:
    for dtype in (torch.float32, torch.float16):
        with pytest.raises(OperandError, match=r"torch\.bfloat16"):
            ATTENTION[AttentionMode.SWA](
                after_full(), TINY.layer_config(0), make_layer(TINY, 0, 9).attention, x().to(dtype)
            )
