"""Output projection: whole groups per rank, FP32 partials added in rank order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from v41_config import TINY, ModelConfig, ParallelLayout
from v41_goldens import LayerWeights, rope_tables
from v41_goldens.errors import OperandError
from v41_goldens.judges import assert_equal_bits, unequal_bits
from v41_goldens.output_projection import grouped_output, o_proj
from v41_goldens.quantisers import dequantize_activation, quantize_activation
from v41_goldens.quantized_weights import Fp8Weight
from v41_goldens.rope import apply_rope
from v41_goldens.weights import AttentionWeights

GROUPS, HEADS, TOKENS = 8, 16, 9
CONFIG = ModelConfig.model_validate(
    {
        **{name: getattr(TINY, name) for name in ModelConfig.model_fields},
        "o_groups": GROUPS,
        "num_attention_heads": HEADS,
    }
)
PER_GROUP = HEADS // GROUPS


@pytest.fixture(scope="module")
def weights(make_layer: Callable[[ModelConfig, int, int], LayerWeights]) -> AttentionWeights:
    """Weights and magnitudes of its own for every group, so that FP32 sums of partials depend on their order."""
    attention = make_layer(CONFIG, 0, 3).attention
    powers = torch.tensor([0, 7, 3, 10, 1, 8, 4, 11], dtype=torch.uint8).repeat_interleave(CONFIG.o_lora_rank // 32)
    scale = (attention.wo_b.scale.view(torch.uint8) + powers).view(torch.float8_e8m0fnu)
    return dataclasses.replace(attention, wo_b=Fp8Weight(attention.wo_b.codes, scale))


@pytest.fixture(scope="module")
def rows() -> tuple[Tensor, Tensor]:
    cos, sin = rope_tables(CONFIG, 64)["swa"]
    return cos[3 : 3 + TOKENS * 5 : 5], sin[3 : 3 + TOKENS * 5 : 5]


def attention_output() -> Tensor:
    return torch.randn(TOKENS, HEADS, CONFIG.head_dim, generator=torch.Generator().manual_seed(0)).bfloat16()


def shard(weights: AttentionWeights, first: int, last: int) -> AttentionWeights:
    """What a rank holds that owns output groups `first:last`."""
    rank = slice(first * CONFIG.o_lora_rank, last * CONFIG.o_lora_rank)
    tiles = slice(rank.start // 32, rank.stop // 32)
    return dataclasses.replace(
        weights,
        wo_a=Fp8Weight(weights.wo_a.codes[rank], weights.wo_a.scale[tiles]),
        wo_b=Fp8Weight(weights.wo_b.codes[:, rank], weights.wo_b.scale[:, tiles]),
    )


def rank_partials(o: Tensor, weights: AttentionWeights, rows: tuple[Tensor, Tensor], tp: int) -> list[Tensor]:
    """Each rank alone, with its own heads and groups."""
    layout = ParallelLayout(tp, 1)
    partials = []
    for rank in range(tp):
        groups, heads = layout.output_group_range(CONFIG, rank), layout.head_range(CONFIG, rank)
        own = shard(weights, groups.start, groups.stop)
        partials.append(o_proj(grouped_output(o[:, heads.start : heads.stop], own, *rows, CONFIG), own, CONFIG))
    return partials


def test_groups_follow_the_definition(weights: AttentionWeights, rows: tuple[Tensor, Tensor]) -> None:
    """Group by group in float64, in BF16 on both sides and without quantising the input."""
    o = attention_output()
    turned = apply_rope(o, *rows, inverse=True)
    wo_a = weights.wo_a.dequantize().bfloat16().unflatten(0, (GROUPS, CONFIG.o_lora_rank))
    parts = []
    for group in range(GROUPS):
        inputs = turned[:, group * PER_GROUP : (group + 1) * PER_GROUP].flatten(1)
        parts.append((inputs.double() @ wo_a[group].double().T).float().bfloat16())
    u = grouped_output(o, weights, *rows, CONFIG)
    assert_equal_bits(u, torch.cat(parts, dim=1), "u")

    inputs = dequantize_activation(quantize_activation(u))
    expected = (inputs.double() @ weights.wo_b.dequantize().double().T).float()
    assert_equal_bits(o_proj(u, weights, CONFIG), expected, "partial")


def test_wrong_groups_differ(weights: AttentionWeights, rows: tuple[Tensor, Tensor]) -> None:
    o = attention_output()
    right = grouped_output(o, weights, *rows, CONFIG)
    cos, sin = rows
    quantised = dequantize_activation(quantize_activation(apply_rope(o, cos, sin, inverse=True))).bfloat16()
    wrong = {
        "heads one group further": grouped_output(o.roll(PER_GROUP, dims=1), weights, *rows, CONFIG),
        "heads one further": grouped_output(o.roll(1, dims=1), weights, *rows, CONFIG),
        "heads dealt round the groups": grouped_output(
            o.unflatten(1, (PER_GROUP, GROUPS)).transpose(1, 2).flatten(1, 2), weights, *rows, CONFIG
        ),
        "not rotated back": grouped_output(o, weights, torch.ones_like(cos), torch.zeros_like(sin), CONFIG),
        "rotated forward again": grouped_output(o, weights, cos, -sin, CONFIG),
        "quantised input": grouped_output(quantised, weights, torch.ones_like(cos), torch.zeros_like(sin), CONFIG),
    }
    for name, u in wrong.items():
        assert unequal_bits(u, right).any(), name


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_parts_are_the_ranks_of_a_group(weights: AttentionWeights, rows: tuple[Tensor, Tensor], tp: int) -> None:
    o = attention_output()
    u = grouped_output(o, weights, *rows, CONFIG)
    partials = rank_partials(o, weights, rows, tp)
    expected = partials[0]
    for partial in partials[1:]:
        expected = expected + partial
    found = o_proj(u, weights, CONFIG, tp)
    assert found.dtype == torch.float32
    assert_equal_bits(found, expected, f"TP{tp}")

    whole = o_proj(u, weights, CONFIG)
    torch.testing.assert_close(found, whole, rtol=0, atol=tp * 2.0**-23 * float(whole.abs().max()))
    if tp > 2:
        backwards = partials[-1]
        for partial in partials[-2::-1]:
            backwards = backwards + partial
        assert unequal_bits(backwards, found).any(), "another order of ranks"
        rounded = sum((partial.bfloat16().float() for partial in partials[1:]), partials[0].bfloat16().float())
        assert unequal_bits(rounded, found).any(), "partials in BF16"


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_ranks_with_the_wrong_heads_differ(weights: AttentionWeights, rows: tuple[Tensor, Tensor], tp: int) -> None:
    """Right groups, but the heads of the next rank, or of a rank that starts in the middle of a group."""
    o = attention_output()
    right = o_proj(grouped_output(o, weights, *rows, CONFIG), weights, CONFIG, tp)
    for shift in (HEADS // tp, 1):
        wrong = sum(rank_partials(o.roll(shift, dims=1), weights, rows, tp), torch.zeros_like(right))
        assert ((wrong - right).abs() > 0.01).any()


@pytest.mark.parametrize("parts", [0, -1, 3, 16])
def test_parts_that_cut_a_group_are_refused(weights: AttentionWeights, rows: tuple[Tensor, Tensor], parts: int) -> None:
    u = grouped_output(attention_output(), weights, *rows, CONFIG)
    with pytest.raises(OperandError, match=f"a divisor of the {GROUPS} output groups, found {parts}"):
        o_proj(u, weights, CONFIG, parts)


def test_no_tokens(weights: AttentionWeights, rows: tuple[Tensor, Tensor]) -> None:
    cos, sin = (table[:0] for table in rows)
    u = grouped_output(attention_output()[:0], weights, cos, sin, CONFIG)
    assert o_proj(u, weights, CONFIG, 4).shape == (0, CONFIG.hidden_size)
