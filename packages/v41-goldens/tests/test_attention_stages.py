"""Every stage of attention can be exchanged: the six modes call the context's table and nothing beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from v41_config import TINY, ModelConfig
from v41_goldens import ATTENTION, LayerWeights, ReferenceEngine
from v41_goldens.attention_stages import AttentionStages

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
