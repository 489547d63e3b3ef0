"""Fast arithmetic: near the exact one where both start from the same inputs, and as independent of the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from v41_config import TINY, LayerConfig, ModelConfig
from v41_goldens import ATTENTION, LayerWeights, ModelWeights, ReferenceEngine, row_tiles
from v41_goldens.attention_stages import AttentionStages
from v41_goldens.experts import routed_experts
from v41_goldens.fast_attention import FAST_STAGES, fast_index_scores, fast_sparse_attention
from v41_goldens.fast_weights import (
    FastFp4Weight,
    FastFp8Weight,
    FastHyperConnectionWeights,
    exact_attention,
    fast_layer,
    fast_model,
)
from v41_goldens.indexer import IndexQueries, index_scores
from v41_goldens.judges import (
    assert_equal_bits,
    assert_relative_budget,
    assert_row_bounds,
    judge_relative_budget,
    judge_row_bounds,
    reference_index_scores,
    unequal_bits,
)
from v41_goldens.linear import quantized_linear
from v41_goldens.moe import moe
from v41_goldens.quantisers import dequantize_index, quantize_index
from v41_goldens.quantized_weights import Fp4Weight, Fp8Weight, RowDecoder
from v41_goldens.sparse_attention import sparse_attention

Layers = Callable[[ModelConfig, int, int], LayerWeights]
TOKENS = 40


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def random_bytes(*shape: int, low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def matrices(n: int, k: int) -> tuple[Fp8Weight, Fp4Weight]:
    codes = random_bytes(n, k)
    codes[codes & 0x7F == 0x7F] = 0
    scales = (random_bytes(n // 32, k // 32, low=110, high=118), random_bytes(n, k // 32, low=110, high=118))
    fp8 = Fp8Weight(codes.view(torch.float8_e4m3fn), scales[0].view(torch.float8_e8m0fnu))
    return fp8, Fp4Weight(random_bytes(n, k // 2).view(torch.int8), scales[1].view(torch.float8_e8m0fnu))


def fast(w: Fp8Weight | Fp4Weight) -> FastFp8Weight | FastFp4Weight:
    return FastFp8Weight(w.codes, w.scale) if isinstance(w, Fp8Weight) else FastFp4Weight(w.packed, w.scale)


# Linears


@pytest.mark.parametrize("kind", [0, 1], ids=["FP8", "FP4"])
def test_bf16_holds_every_weight(kind: int) -> None:
    w = matrices(64, 160)[kind]
    assert_equal_bits(w.dequantize(torch.bfloat16).float(), w.dequantize(), "weights")


@pytest.mark.parametrize("kind", [0, 1], ids=["FP8", "FP4"])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 32, 32), (33, 96, 5120), (70, 1504, 704)])
def test_linears_are_near_the_exact_ones(kind: int, rows: int, n: int, k: int) -> None:
    w, x = matrices(n, k)[kind], normal(rows, k)
    exact = quantized_linear(x, w)
    assert_relative_budget(quantized_linear(x, fast(w)), exact, "linear")
    assert_row_bounds(quantized_linear(x, fast(w)), exact, "linear")
    one_off = dataclasses.replace(w, scale=w.scale.view(torch.uint8).sub(1).view(torch.float8_e8m0fnu))
    assert not judge_relative_budget(quantized_linear(x, fast(one_off)), exact)


@pytest.mark.parametrize("kind", [0, 1], ids=["FP8", "FP4"])
def test_a_row_does_not_depend_on_the_rows_beside_it(kind: int) -> None:
    w, x = fast(matrices(512, 1280)[kind]), normal(71, 1280)
    together = quantized_linear(x, w)
    for rows in ([5], [70, 5, 6], range(31, 64), torch.randperm(71).tolist()):
        assert_equal_bits(quantized_linear(x[list(rows)], w), together[list(rows)], f"rows {rows}")
    assert quantized_linear(x[:0], w).shape == (0, 512)


def test_every_product_has_the_same_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = set[tuple[int, ...]]()
    multiply = torch.mm

    def watched(w: Tensor, x: Tensor, out: Tensor) -> Tensor:
        shapes.add((*w.shape, x.shape[1]))
        return multiply(w, x, out=out)

    monkeypatch.setattr(torch, "mm", watched)
    w = fast(matrices(512, 1280)[1])
    quantized_linear(normal(1, 1280), w)
    one = set(shapes)
    quantized_linear(normal(100, 1280), w)
    assert shapes == one
    assert {rows for _, _, rows in shapes} == {row_tiles.ROW_TILE}


# Attention and index scores


def attention_operands(tokens: int, columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A token without entries, one with a single one, and rows of NaN where nothing is valid."""
    q, kv = normal(tokens, 8, 64), normal(tokens, columns, 64, seed=2)
    valid = torch.rand(tokens, columns, generator=torch.Generator().manual_seed(3)) < 0.5
    valid[0], valid[1] = False, False
    valid[1, columns - 1] = True
    kv[~valid] = torch.nan
    return q, kv, valid, normal(8, seed=4).float()


@pytest.mark.parametrize("columns", [16, 64, 130, 300])
def test_attention_is_near_the_exact_one(columns: int) -> None:
    q, kv, valid, sink = attention_operands(9, columns)
    exact = sparse_attention(q, kv, valid, sink, 0.125)
    found = fast_sparse_attention(q, kv, valid, sink, 0.125)
    assert not found[0].any()
    assert_relative_budget(found, exact, "attention")
    assert_row_bounds(found.flatten(1), exact.flatten(1), "attention")
    other_scale = fast_sparse_attention(q, kv, valid, sink, 0.0625)
    assert not judge_row_bounds(other_scale.flatten(1), exact.flatten(1))
    without_sink = fast_sparse_attention(q, kv, valid, sink - torch.inf, 0.125)
    assert not judge_row_bounds(without_sink.flatten(1), exact.flatten(1))


def test_a_token_attends_alone_as_in_company() -> None:
    q, kv, valid, sink = attention_operands(9, 300)
    together = fast_sparse_attention(q, kv, valid, sink, 0.125)
    for rows in ([4], [8, 4], [0, 1, 2, 3, 5]):
        found = fast_sparse_attention(q[rows], kv[rows], valid[rows], sink, 0.125)
        assert_equal_bits(found, together[rows], f"tokens {rows}")
    assert fast_sparse_attention(q[:0], kv[:0], valid[:0], sink, 0.125).shape == (0, 8, 64)


@pytest.mark.parametrize("entries", [1, 37, 1024, 1500])
def test_index_scores_are_near_the_exact_ones(entries: int) -> None:
    """A score is a sum of few BF16 terms: it differs where a product's last bit does."""
    q = dequantize_index(quantize_index(normal(2, 3, 4, 64)))
    queries = IndexQueries(q, normal(2, 3, 4, seed=5))
    keys = dequantize_index(quantize_index(normal(2, entries, 64, seed=6)))
    exact, found = index_scores(queries, keys).float(), fast_index_scores(queries, keys).float()
    assert_relative_budget(found.flatten(0, 1), exact.flatten(0, 1), "scores")
    assert not judge_relative_budget(
        fast_index_scores(queries, keys.flip(0)).float().flatten(0, 1), exact.flatten(0, 1)
    )
    fewer = fast_index_scores(IndexQueries(q[1:, 2:], queries.weights[1:, 2:]), keys[1:, : entries // 2 + 1])
    assert_equal_bits(fewer.float(), found[1:, 2:, : entries // 2 + 1], "a part of them")


# Layers


def attention_of(make_layer: Layers, layer: LayerConfig, *, fast: bool) -> Tensor:
    """A layer's attention output of one prompt; the layers before it have published what it reads, exactly."""
    ctx = ReferenceEngine(TINY, None, 1, TOKENS).context([0], [TOKENS])
    output = torch.empty(0)
    for earlier in TINY.layers[: layer.layer_id + 1]:
        weights, last = make_layer(TINY, earlier.layer_id, 1), earlier is layer
        if fast and last:
            weights, ctx.stages = fast_layer(weights), FAST_STAGES
        output = ATTENTION[earlier.mode](ctx, earlier, weights.attention, normal(TOKENS, TINY.hidden_size, seed=9))
    return output


@pytest.mark.parametrize("layer", [TINY.layers[i] for i in (0, 2, 3, 6, 7, 8)], ids=lambda layer: layer.mode.value)
def test_attention_of_every_mode_is_near_the_exact_one(make_layer: Layers, layer: LayerConfig) -> None:
    exact, found = (attention_of(make_layer, layer, fast=fast) for fast in (False, True))
    assert unequal_bits(found, exact).any(), "the other arithmetic was used"
    assert_relative_budget(found, exact, layer.mode.title)
    assert_row_bounds(found, exact, layer.mode.title)
    assert not judge_relative_budget(found[:, torch.arange(found.shape[1]).roll(1)], exact)


def test_experts_are_near_the_exact_ones(make_layer: Layers) -> None:
    weights, x = make_layer(TINY, 3, 1).moe, normal(TOKENS, TINY.hidden_size)
    fast_moe = fast_layer(make_layer(TINY, 3, 1)).moe
    assert all(type(expert.w1) is FastFp4Weight for expert in fast_moe.experts.values())
    exact = moe(x, weights, TINY)
    assert_relative_budget(moe(x, fast_moe, TINY), exact, "MoE")
    swapped = dict(zip(fast_moe.experts, reversed(fast_moe.experts.values()), strict=True))
    assert not judge_relative_budget(moe(x, dataclasses.replace(fast_moe, experts=swapped), TINY), exact)


def test_an_expert_is_dequantised_once_for_all_its_rows(make_layer: Layers, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = fast_layer(make_layer(TINY, 3, 1)).moe
    dequantised: list[int] = []
    decoder = FastFp4Weight.decoder

    def watched(self: FastFp4Weight, dtype: torch.dtype = torch.float32) -> RowDecoder:
        rows = decoder(self, dtype)

        def watched_rows(start: int, stop: int) -> Tensor:
            dequantised.append(self.packed[start:].data_ptr())
            return rows(start, stop)

        return watched_rows

    monkeypatch.setattr(FastFp4Weight, "decoder", watched)
    ids = torch.tensor([5, 2, 5, 5, -1, 2])
    routed_experts(normal(6, TINY.hidden_size), ids, torch.ones(6), weights.experts, TINY)
    assert len(dequantised) == len(set(dequantised)) == 3 * 2


# Engine


def test_the_engine_is_exact_unless_told_otherwise(tiny_weights: ModelWeights) -> None:
    """In TINY's short sums both arithmetics often agree to the bit, so it is asked what they are made of."""
    exact, found = ReferenceEngine(TINY, tiny_weights), ReferenceEngine(TINY, tiny_weights, fast=True)
    assert exact.weights is tiny_weights
    assert exact.context([0], [1]).stages == AttentionStages()
    assert found.context([0], [0]).stages is FAST_STAGES
    assert found.weights is not None
    assert type(found.weights.layers[0].attention.wo_a) is FastFp8Weight
    assert found.step([(0, range(30))]).logits.isfinite().all()


def test_a_judge_is_exact_whatever_it_is_handed(make_layer: Layers) -> None:
    layer = TINY.layer_config(6)
    weights, x = make_layer(TINY, 6, 1), normal(TOKENS, TINY.hidden_size)
    ctx = ReferenceEngine(TINY, None, 1, TOKENS).context([0], [TOKENS])
    ATTENTION[layer.mode](ctx, layer, weights.attention, x)
    exact = reference_index_scores(ctx, layer, weights.attention, x)
    handed = dataclasses.replace(ctx, stages=FAST_STAGES)
    assert_equal_bits(
        reference_index_scores(handed, layer, fast_layer(weights).attention, x), exact, "scores from fast weights"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Zeros(FastFp8Weight):
    """Somebody's own arithmetic."""

    factor: float = 0.0

    def dot(self, x: Tensor) -> Tensor:
        return super().dot(x) * self.factor


def test_weights_of_derived_classes_are_exchanged_too(make_layer: Layers) -> None:
    weights, x = make_layer(TINY, 6, 1), normal(5, TINY.hidden_size)
    wq_a = weights.attention.wq_a
    own = dataclasses.replace(weights.attention, wq_a=Zeros(wq_a.codes, wq_a.scale))
    assert not quantized_linear(x, own.wq_a).any()
    assert type(exact_attention(own).wq_a) is Fp8Weight
    assert_equal_bits(quantized_linear(x, exact_attention(own).wq_a), quantized_linear(x, wq_a), "exact")
    assert type(fast_layer(dataclasses.replace(weights, attention=own)).attention.wq_a) is FastFp8Weight
    assert type(fast_layer(fast_layer(weights)).hc_ffn) is FastHyperConnectionWeights


def test_layers_are_still_loaded_when_they_are_asked_for(tiny_weights: ModelWeights) -> None:
    asked: list[int] = []

    class Layers(Sequence[LayerWeights]):
        def __getitem__(self, index: int) -> LayerWeights:  # type: ignore[override]
            asked.append(index)
            return tiny_weights.layers[index]

        def __len__(self) -> int:
            return len(tiny_weights.layers)

    layers = fast_model(dataclasses.replace(tiny_weights, layers=Layers())).layers
    assert (len(layers), asked) == (TINY.num_hidden_layers, [])
    assert isinstance(layers[4].attention.wq_a, FastFp8Weight)
    assert asked == [4]


def test_rows_that_want_gradients_are_multiplied() -> None:
    x, fp8 = normal(5, 64), matrices(64, 64)[0]
    w = FastFp8Weight(fp8.codes, fp8.scale)
    assert_equal_bits(w.dot(x.float().requires_grad_()), w.dot(x.float()), "gradients")
