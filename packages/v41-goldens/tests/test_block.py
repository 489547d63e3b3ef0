"""The block and the model around it: staggered pre-mix, token checks, capture and injection."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from v41_config import TINY, LayerConfig, ModelConfig
from v41_goldens import ATTENTION, Capture, ForwardContext, LayerWeights, ModelWeights, ReferenceEngine, block, forward
from v41_goldens.block import entry_streams
from v41_goldens.errors import OperandError
from v41_goldens.hyper_connections import mhc_mixes, mhc_post, mhc_pre
from v41_goldens.judges import assert_equal_bits, unequal_bits
from v41_goldens.model import final_logits
from v41_goldens.moe import moe
from v41_goldens.rms_norm import rms_norm

TOKENS = 12
Streams = tuple[Tensor, Tensor]


def some_streams() -> Streams:
    generator = torch.Generator().manual_seed(2)
    x_hc = torch.randn(TOKENS, TINY.hc_mult, TINY.hidden_size, generator=generator).bfloat16()
    return x_hc, torch.rand(TOKENS, TINY.hc_mult, generator=generator)


def context() -> ForwardContext:
    return ReferenceEngine(TINY, None, 1, 64).context([0], [TOKENS])


def by_hand(
    layer: LayerConfig,
    weights: LayerWeights,
    streams: Streams,
    *,
    staggered: bool = True,
    comb_of: Callable[[Tensor], Tensor] = lambda comb: comb,
    norms: tuple[Tensor, Tensor] | None = None,
) -> Streams:
    """The block written out, with a knob for each way to wire it wrongly."""
    (x_hc, pre_mix), eps = streams, TINY.rms_norm_eps
    attn_norm, ffn_norm = norms or (weights.attn_norm, weights.ffn_norm)
    pre, post, comb = mhc_mixes(x_hc, weights.hc_attn, TINY)
    attn_in = rms_norm(mhc_pre(x_hc, pre_mix if staggered else pre), attn_norm, eps)
    attn_out = ATTENTION[layer.mode](context(), layer, weights.attention, attn_in).bfloat16()
    x_hc = mhc_post(attn_out, x_hc, post, comb_of(comb))
    next_pre, post, comb = mhc_mixes(x_hc, weights.hc_ffn, TINY)
    moe_in = rms_norm(mhc_pre(x_hc, pre if staggered else next_pre), ffn_norm, eps)
    return mhc_post(moe(moe_in, weights.moe, TINY), x_hc, post, comb_of(comb)), next_pre


@pytest.mark.parametrize("layer_id", [0, 2, 6])
def test_the_pre_mix_is_staggered(make_layer: Callable[[ModelConfig, int, int], LayerWeights], layer_id: int) -> None:
    layer, weights, streams = TINY.layer_config(layer_id), make_layer(TINY, layer_id, 4), some_streams()
    x_hc, pre_mix = block(context(), layer, weights, *streams)
    right = by_hand(layer, weights, streams)
    assert_equal_bits(x_hc, right[0], "streams")
    assert_equal_bits(pre_mix, right[1], "pre-mix for the next layer")
    wrong = {
        "not staggered": by_hand(layer, weights, streams, staggered=False),
        "mix transposed": by_hand(layer, weights, streams, comb_of=lambda comb: comb.transpose(1, 2)),
        "norms swapped": by_hand(layer, weights, streams, norms=(weights.ffn_norm, weights.attn_norm)),
        "hyper-connections swapped": by_hand(
            layer, dataclasses.replace(weights, hc_attn=weights.hc_ffn, hc_ffn=weights.hc_attn), streams
        ),
    }
    for name, (streams_out, _) in wrong.items():
        assert unequal_bits(streams_out, x_hc).any(), name


def test_entry_and_exit(tiny_weights: ModelWeights) -> None:
    """Embedding in every lane, collapsed from lane zero: the boundary without a layer in between."""
    tokens = torch.tensor([3, 3, 511, 0])
    x_hc, pre_mix = entry_streams(tiny_weights.embed[tokens], TINY.hc_mult)
    for lane in range(TINY.hc_mult):
        assert_equal_bits(x_hc[:, lane].contiguous(), tiny_weights.embed[tokens], f"lane {lane}")
    assert pre_mix.tolist() == [[1.0, 0.0, 0.0, 0.0]] * 4
    logits = final_logits(context(), tiny_weights, x_hc, pre_mix)
    normed = rms_norm(tiny_weights.embed[tokens], tiny_weights.norm, TINY.rms_norm_eps)
    assert_equal_bits(logits, (normed.double() @ tiny_weights.head.double().T).float(), "logits")


def engine_with(weights: ModelWeights) -> ReferenceEngine:
    return ReferenceEngine(TINY, weights, 1, 64)


PROMPT = random.Random(0).choices(range(TINY.vocab_size), k=33)


def test_capture_keeps_what_was_there(tiny_weights: ModelWeights) -> None:
    capture = Capture()
    output = engine_with(tiny_weights).step([(0, PROMPT)], capture)
    plain = engine_with(tiny_weights).step([(0, PROMPT)])
    assert_equal_bits(output.logits, plain.logits, "logits with and without capture")
    assert_equal_bits(capture.tensors["logits"], output.logits, "logits")
    assert_equal_bits(capture.tensors["layer.09.X"], output.x_hc, "streams")
    kept = torch.ones(3)
    capture.put("kept", kept)
    kept.zero_()
    assert capture.tensors["kept"].tolist() == [1.0, 1.0, 1.0]


INJECTABLE = ("attn_in", "attn_out", "moe_in", "moe_out", "X", "pre_mix", "topk")


def test_injecting_what_was_captured_changes_nothing(tiny_weights: ModelWeights) -> None:
    first, second = Capture(), Capture()
    engine_with(tiny_weights).step([(0, PROMPT)], first)
    stored = {name: tensor for name, tensor in first.tensors.items() if name.rsplit(".", 1)[-1] in INJECTABLE}
    engine_with(tiny_weights).step([(0, PROMPT)], second, stored)
    assert second.tensors.keys() == first.tensors.keys()
    for name, tensor in first.tensors.items():
        assert_equal_bits(second.tensors[name], tensor, name)


@pytest.mark.parametrize("name", INJECTABLE)
def test_an_injected_value_is_where_the_forward_goes_on(tiny_weights: ModelWeights, name: str) -> None:
    """Layer 4's value is replaced: what came before stays, what comes after changes, and the own value is recorded."""
    first, second = Capture(), Capture()
    expected = engine_with(tiny_weights).step([(0, PROMPT)], first).logits
    key = f"layer.04.{name}"
    changed = first.tensors[key].clone()
    changed[30] = changed[20] if name == "topk" else changed[30] * 2 + 1
    found = engine_with(tiny_weights).step([(0, PROMPT)], second, {key: changed}).logits
    for layer_id in range(4):
        assert_equal_bits(second.tensors[f"layer.{layer_id:02d}.X"], first.tensors[f"layer.{layer_id:02d}.X"], "before")
    assert_equal_bits(second.tensors[key], first.tensors[key], "the layer's own value")
    assert not unequal_bits(found[:30], expected[:30]).any(), "causal"
    assert unequal_bits(found[30], expected[30]).any()


@pytest.mark.parametrize("bad", [-1, 512, 2**31 - 1, 2**40])
def test_ids_outside_the_vocabulary_are_refused_before_anything_is_stored(tiny_weights: ModelWeights, bad: int) -> None:
    engine = ReferenceEngine(TINY, tiny_weights, 2, 64, fill_byte=0xFF)
    with pytest.raises(OperandError, match=rf"tokens\[3\]: expected an id from 0 to 511, found {bad}"):
        engine.step([(0, [1, 2]), (1, [3, bad, 4])])
    assert engine.lengths.tolist() == [0, 0]
    assert all(cache.scale.float().isnan().all() for cache in engine.caches.window.values())


@pytest.mark.parametrize(
    "tokens",
    [torch.zeros(TOKENS + 1).int(), torch.zeros(TOKENS - 1).int(), torch.zeros(1, TOKENS).int(), torch.zeros(TOKENS),
     torch.zeros(TOKENS, dtype=torch.bool)],
    ids=["longer", "shorter", "two dimensions", "float", "bool"],
)  # fmt: skip
def test_tokens_that_are_not_one_per_row_are_refused(tiny_weights: ModelWeights, tokens: Tensor) -> None:
    engine = ReferenceEngine(TINY, None, 1, 64, fill_byte=0xFF)
    with pytest.raises(OperandError, match=rf"tokens: expected integers \[{TOKENS}\], one for each packed row"):
        forward(engine.context([0], [TOKENS]), tiny_weights, tokens)
    assert all(cache.scale.float().isnan().all() for cache in engine.caches.window.values())
