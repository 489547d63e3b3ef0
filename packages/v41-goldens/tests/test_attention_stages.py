"""Every stage of attention can be exchanged: the six modes call the context's table and nothing beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from v41_config import TINY, ModelConfig
from v41_goldens import ATTENTION, LayerWeights, ReferenceEngine
from v41_goldens.attention_stages import AttentionStages, attend
from v41_goldens.fast_attention import fast_sparse_attention
from v41_goldens.judges import assert_equal_bits
from v41_goldens.sparse_attention import sparse_attention

TOKENS = 6


def outputs(make_layer: Callable[[ModelConfig, int, int], LayerWeights], stages: AttentionStages) -> list[Tensor]:
    """Each layer's attention of one prompt."""
    ctx = ReferenceEngine(TINY, None, 1, TOKENS).context([0], [TOKENS])
    ctx.stages = stages
    found = []
    for layer in TINY.layers:
        x = torch.randn(TOKENS, TINY.hidden_size, generator=torch.Generator().manual_seed(layer.layer_id)).bfloat16()
        weights = make_layer(TINY, layer.layer_id, 1).attention
        found.append(ATTENTION[layer.mode](ctx, layer, weights, x))
    return found


def test_every_stage_is_called(make_layer: Callable[[ModelConfig, int, int], LayerWeights]) -> None:
    called = set[str]()

    def noting(name: str, golden: Callable[..., Any]) -> Callable[..., Any]:
        def stage(*arguments: Any) -> Any:
            called.add(name)
            return golden(*arguments)

        return stage

    goldens = AttentionStages()
    names = [field.name for field in dataclasses.fields(AttentionStages)]
    noted = dataclasses.replace(goldens, **{name: noting(name, getattr(goldens, name)) for name in names})
    for ours, expected in zip(outputs(make_layer, noted), outputs(make_layer, goldens), strict=True):
        assert torch.equal(ours, expected)
    assert called == set(names)


def test_what_replaces_a_stage_decides(make_layer: Callable[[ModelConfig, int, int], LayerWeights]) -> None:
    """Without a stage's output the attention is another one: nobody calls the golden behind the table's back."""
    goldens = AttentionStages()
    right = outputs(make_layer, goldens)

    def zeros(*arguments: Any) -> Tensor:
        return torch.zeros_like(goldens.sparse_attention(*arguments))

    wrong = outputs(make_layer, dataclasses.replace(goldens, sparse_attention=zeros))
    assert all(not torch.equal(ours, expected) for ours, expected in zip(wrong, right, strict=True))


def long_lists() -> ModelConfig:
    """Windows that are no multiple of E4's chunks, and selections of many chunks."""
    fields = {name: getattr(TINY, name) for name in ModelConfig.model_fields}
    changes = {"sliding_window": 40, "index_topk": 300, "candidate_topk_blocks": 40}
    return ModelConfig.model_validate(fields | changes)


@pytest.mark.parametrize("sparse", [sparse_attention, fast_sparse_attention])
@pytest.mark.parametrize("layer_id", [2, 3, 7])
def test_chunks_that_are_left_out_change_no_bit(
    make_layer: Callable[[ModelConfig, int, int], LayerWeights], sparse: Callable[..., Tensor], layer_id: int
) -> None:
    """A selection with holes, with less in its second tile of tokens, with nothing, and with its last entry alone."""
    config, tokens = long_lists(), 70
    layer, weights = config.layer_config(layer_id), make_layer(config, layer_id, 1).attention
    engine = ReferenceEngine(config, None, 1, tokens, fill_byte=0xFF)
    seen: list[tuple[int, int]] = []

    def attended(q: Tensor, kv: Tensor, valid: Tensor, sink: Tensor, scale: float) -> Tensor:
        missing = 340 - valid.shape[1]
        whole = (pad(kv, (0, 0, 0, missing), value=torch.nan), pad(valid, (0, missing)))
        found = sparse(q, kv, valid, sink, scale)
        assert_equal_bits(found, sparse(q, *whole, sink, scale), "the whole list")
        seen.append((len(q), valid.shape[1]))
        return found

    ctx = engine.context([0], [tokens])
    ctx.stages = dataclasses.replace(AttentionStages(), sparse_attention=attended)
    assert layer.kv_source is not None
    assert layer.index_source is not None
    for earlier in config.layers[: layer_id + 1]:
        if earlier.owns_kv or earlier.owns_index or earlier is layer:
            x = torch.randn(tokens, config.hidden_size, generator=torch.Generator().manual_seed(earlier.layer_id))
            ATTENTION[earlier.mode](ctx, earlier, make_layer(config, earlier.layer_id, 1).attention, x.bfloat16())
    rows = ctx.caches.compressed[layer.kv_source].read(torch.zeros(1, 1, dtype=torch.int32))
    assert rows.isfinite().all()
    seen.clear()
    q = torch.randn(tokens, config.num_attention_heads, 64, generator=torch.Generator().manual_seed(9)).bfloat16()
    for columns, width in {(): 64, (0,): 64, (23,): 64, (24,): 128, (5, 100, 200): 256, (299,): 340}.items():
        selected = torch.full((tokens, 300), -1, dtype=torch.int32)
        selected[1:64, list(columns)] = 0
        selected[64:, :3] = 0
        ctx.topk[layer.index_source] = selected
        attend(ctx, layer, weights, q)
        assert seen == [(64, width), (6, 64)]
        seen.clear()
