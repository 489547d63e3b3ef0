"""Queries and window KV against their definition, and near misses that must show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from v41_config import TINY, ModelConfig
from v41_goldens import LayerWeights, rope_tables
from v41_goldens.errors import OperandError
from v41_goldens.judges import assert_equal_bits, unequal_bits
from v41_goldens.qkv import kv_proj_rope, q_proj_qr, q_proj_rope
from v41_goldens.quantisers import dequantize_activation, quantize_activation
from v41_goldens.quantized_weights import Fp8Weight
from v41_goldens.weights import AttentionWeights

TOKENS = 7
POSITIONS = torch.tensor([0, 1, 5, 6, 6, 100, 127])


@pytest.fixture(scope="module")
def weights(make_layer: Callable[[ModelConfig, int, int], LayerWeights]) -> AttentionWeights:
    return make_layer(TINY, 3, 5).attention


@pytest.fixture(scope="module")
def rows() -> tuple[Tensor, Tensor]:
    cos, sin = rope_tables(TINY, 128)["compressed"]
    return cos[POSITIONS], sin[POSITIONS]


def x() -> Tensor:
    return torch.randn(TOKENS, TINY.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()


def linear(rows: Tensor, weight: Fp8Weight) -> Tensor:
    inputs = dequantize_activation(quantize_activation(rows)).double()
    return (inputs @ weight.dequantize().double().T).float().bfloat16()


def norm(rows: Tensor, weight: Tensor) -> Tensor:
    wide = rows.float()
    mean = (wide * wide).double().mean(-1, keepdim=True).float() + torch.tensor(TINY.rms_norm_eps)
    return (wide * mean.double().rsqrt().float() * weight.float()).bfloat16()


def turn(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The last `qk_rope_head_dim` of `[T, D]`, pair by pair."""
    turned, start = rows.clone(), rows.shape[-1] - TINY.qk_rope_head_dim
    for pair in range(TINY.qk_rope_head_dim // 2):
        a, b = rows[:, start + 2 * pair].float(), rows[:, start + 2 * pair + 1].float()
        turned[:, start + 2 * pair] = (a * cos[:, pair] - b * sin[:, pair]).bfloat16()
        turned[:, start + 2 * pair + 1] = (a * sin[:, pair] + b * cos[:, pair]).bfloat16()
    return turned


def test_definition(weights: AttentionWeights, rows: tuple[Tensor, Tensor]) -> None:
    qr = q_proj_qr(x(), weights, TINY)
    assert_equal_bits(qr, norm(linear(x(), weights.wq_a), weights.q_norm), "qr")
    q = q_proj_rope(qr, weights, *rows, TINY)
    heads = linear(qr, weights.wq_b).unflatten(1, (TINY.num_attention_heads, TINY.head_dim))
    assert_equal_bits(q, torch.stack([turn(head, *rows) for head in heads.unbind(1)], dim=1), "q")
    kv = kv_proj_rope(x(), weights, *rows, TINY)
    assert_equal_bits(kv, turn(norm(linear(x(), weights.wkv), weights.kv_norm), *rows), "kv")


def test_a_rank_computes_its_own_heads(weights: AttentionWeights, rows: tuple[Tensor, Tensor]) -> None:
    qr = q_proj_qr(x(), weights, TINY)
    whole = q_proj_rope(qr, weights, *rows, TINY)
    for first in range(0, TINY.num_attention_heads, 2):
        channels = slice(first * TINY.head_dim, (first + 2) * TINY.head_dim)
        scale = weights.wq_b.scale[channels.start // 32 : channels.stop // 32]
        own = dataclasses.replace(weights, wq_b=Fp8Weight(weights.wq_b.codes[channels], scale))
        assert_equal_bits(q_proj_rope(qr, own, *rows, TINY), whole[:, first : first + 2], f"heads from {first}")


def test_near_misses_differ(weights: AttentionWeights, rows: tuple[Tensor, Tensor]) -> None:
    qr = q_proj_qr(x(), weights, TINY)
    q = q_proj_rope(qr, weights, *rows, TINY)
    kv = kv_proj_rope(x(), weights, *rows, TINY)
    swa = [table[POSITIONS] for table in rope_tables(TINY, 128)["swa"]]
    late = [table[POSITIONS + 1] for table in rope_tables(TINY, 129)["compressed"]]
    first = [table[POSITIONS[:1]].expand(TOKENS, -1) for table in rope_tables(TINY, 128)["compressed"]]
    for name, (cos, sin) in {"other profile": swa, "next position": late, "first token's angle": first}.items():
        assert unequal_bits(q_proj_rope(qr, weights, cos, sin, TINY), q).any(), name
        assert unequal_bits(kv_proj_rope(x(), weights, cos, sin, TINY), kv).any(), name
    unnormed = linear(x(), weights.wq_a)
    assert unequal_bits(q_proj_rope(unnormed, weights, *rows, TINY), q).any()
    per_head = norm(linear(qr, weights.wq_b).unflatten(1, (-1, TINY.head_dim)), torch.ones(TINY.head_dim).bfloat16())
    assert unequal_bits(torch.stack([turn(head, *rows) for head in per_head.unbind(1)], dim=1), q).any()


def test_rows_for_another_number_of_tokens_are_refused(weights: AttentionWeights, rows: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(OperandError, match="apply_rope"):
        kv_proj_rope(x()[1:], weights, *rows, TINY)


def test_no_tokens(weights: AttentionWeights, rows: tuple[Tensor, Tensor]) -> None:
    cos, sin = (table[:0] for table in rows)
    qr = q_proj_qr(x()[:0], weights, TINY)
    assert q_proj_rope(qr, weights, cos, sin, TINY).shape == (0, TINY.num_attention_heads, TINY.head_dim)
