"""One block of each attention mode at the released model's dimensions, with eight experts and few tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch

from v41_config import FLASH, FLASH6, AttentionMode, ModelConfig
from v41_goldens import LayerWeights, ReferenceEngine, block
from v41_goldens.judges import assert_equal_bits, unequal_bits

TOKENS, SPLIT = 7, 3  # an odd split: ratio 2 meets a pair whose halves come in different steps


def test_blocks_of_every_mode_are_chunk_invariant(
    make_layer: Callable[[ModelConfig, int, int], LayerWeights],
) -> None:
    """Request 0 takes its tokens in one step, request 1 the same tokens in two, with a stranger between.

    Weights are made layer by layer and dropped; the streams go on from layer to layer.
    """
    per_layer = ("hidden_size", "num_attention_heads", "head_dim", "q_lora_rank", "o_lora_rank", "o_groups",
                 "moe_intermediate_size", "num_experts_per_tok", "index_n_heads", "index_head_dim", "index_topk",
                 "sliding_window", "hc_mult")  # fmt: skip
    assert [getattr(FLASH6, name) for name in per_layer] == [getattr(FLASH, name) for name in per_layer]
    assert {layer.mode for layer in FLASH6.layers} == set(AttentionMode)

    generator = torch.Generator().manual_seed(0)
    x_hc = torch.randn(TOKENS + 2, FLASH6.hc_mult, FLASH6.hidden_size, generator=generator).bfloat16()
    pre_mix = torch.rand(TOKENS + 2, FLASH6.hc_mult, generator=generator)
    own, stranger = range(TOKENS), range(TOKENS, TOKENS + 2)
    engine = ReferenceEngine(FLASH6, None, 3, 16, shuffle_seed=0, fill_byte=0xFF)
    steps = [engine.context([0, 1], [TOKENS, SPLIT]), engine.context([2, 1], [2, TOKENS - SPLIT])]
    rows = [[*own, *own[:SPLIT]], [*stranger, *own[SPLIT:]]]
    streams = [(x_hc[part], pre_mix[part]) for part in rows]
    for layer in FLASH6.layers:
        weights = make_layer(FLASH6, layer.layer_id, 1)
        streams = [block(ctx, layer, weights, *x) for ctx, x in zip(steps, streams, strict=True)]
        del weights
        for first, second in zip(*streams, strict=True):
            whole, chunked = first[:TOKENS], torch.cat([first[TOKENS:], second[2:]])
            assert whole.isfinite().all()
            assert_equal_bits(chunked, whole, layer.mode.title)
        (streams_out, next_pre), _ = streams
        assert streams_out.shape == (TOKENS + SPLIT, FLASH6.hc_mult, FLASH6.hidden_size)
        assert streams_out.dtype == torch.bfloat16
        assert next_pre.shape == (TOKENS + SPLIT, FLASH6.hc_mult)
        assert next_pre.dtype == torch.float32
        assert unequal_bits(streams_out[:TOKENS], x_hc[own]).any(dim=(1, 2)).all(), "every row went through the block"
        assert unequal_bits(streams_out[:2], streams[1][0][:2]).any(dim=(1, 2)).all(), "the stranger's rows differ"
