"""The released model's dimensions, with eight experts and few tokens: operators, blocks of each mode, long contexts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from v41_config import FLASH, FLASH6, AttentionMode, ModelConfig
from v41_goldens import ATTENTION, Capture, LayerWeights, ReferenceEngine, block
from v41_goldens.fast_attention import FAST_STAGES, fast_index_scores
from v41_goldens.fast_weights import fast_layer
from v41_goldens.fixtures import FixtureCase
from v41_goldens.fixtures.long_context import long_context
from v41_goldens.fixtures.random_layer import random_layer
from v41_goldens.golden_run import validate
from v41_goldens.indexer import IndexQueries, index_scores, select_entries
from v41_goldens.judges import assert_equal_bits, assert_relative_budget, assert_row_bounds, unequal_bits
from v41_goldens.moe import moe
from v41_goldens.operators import names
from v41_goldens.quantisers import dequantize_index, quantize_index

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


@pytest.mark.conform
@pytest.mark.parametrize("name", [name for name in names() if not name.endswith("_sharded")])
def test_every_operator(name: str) -> None:
    """In each wiring it has, with padding and an inactive row: `validate` says what is judged."""
    run = validate(name, FixtureCase(config=FLASH6, tokens=5, active_tokens=4, requests=2), preset="flash6")
    assert run.passed, run.error


# Fast arithmetic


@pytest.mark.conform
def test_sublayers_of_every_mode_are_near_the_exact_ones_and_chunk_invariant() -> None:
    """Request 0 takes its tokens in one step, request 1 the same tokens in two; both start from the same inputs."""
    x = torch.randn(TOKENS, FLASH6.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    engine = ReferenceEngine(FLASH6, None, 3, 16, shuffle_seed=0, fill_byte=0xFF)
    exact_step = engine.context([2], [TOKENS])
    steps = [engine.context([0, 1], [TOKENS, SPLIT]), engine.context([1], [TOKENS - SPLIT])]
    for step in steps:
        step.stages = FAST_STAGES
    for layer in FLASH6.layers:
        weights = random_layer(FLASH6, layer.layer_id)
        fast = fast_layer(weights)
        exact = ATTENTION[layer.mode](exact_step, layer, weights.attention, x)
        first = ATTENTION[layer.mode](steps[0], layer, fast.attention, torch.cat([x, x[:SPLIT]]))
        second = ATTENTION[layer.mode](steps[1], layer, fast.attention, x[SPLIT:])
        assert_equal_bits(torch.cat([first[TOKENS:], second]), first[:TOKENS], f"chunks of {layer.mode.title}")
        assert unequal_bits(first[:TOKENS], exact).any()
        assert_relative_budget(first[:TOKENS], exact, layer.mode.title)
        assert_row_bounds(first[:TOKENS], exact, layer.mode.title)
        if layer.layer_id < 2:
            assert_relative_budget(moe(x, fast.moe, FLASH6), moe(x, weights.moe, FLASH6), "MoE")
            alone = torch.cat([moe(row, fast.moe, FLASH6) for row in x.split(1)])
            assert_equal_bits(alone, moe(x, fast.moe, FLASH6), "tokens alone")


# Long contexts

FULL, REINDEX = FLASH6.layer_config(3), FLASH6.layer_config(4)
LONG = 40_000


def index_queries_of(tokens: int) -> IndexQueries:
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(tokens, FLASH6.index_n_heads, FLASH6.index_head_dim, generator=generator).bfloat16()
    weights = torch.randn(tokens, FLASH6.index_n_heads, generator=generator).bfloat16()
    return IndexQueries(dequantize_index(quantize_index(q)), weights)


def best(scores: Tensor, k: int) -> list[int]:
    """The k best, ties to the lower index, in ascending order, by a stable sort."""
    order = torch.sort(scores.float(), descending=True, stable=True).indices[:k]
    return sorted(order.tolist())


@pytest.mark.conform
def test_candidates_restrict_a_selection_from_40000_entries() -> None:
    queries = index_queries_of(3)
    ctx = long_context(FLASH6, LONG, 3)
    ctx.capture = Capture()
    full, restricted = (select_entries(ctx, layer, queries) for layer in (FULL, REINDEX))
    keys = ctx.caches.index_key[3].read(torch.arange(LONG))
    kept = FLASH6.candidate_topk_blocks * FLASH6.candidate_block_size
    assert kept == 16_384
    for token in range(3):
        visible = LONG - 2 + token
        scores = index_scores(IndexQueries(queries.q[[token]], queries.weights[[token]]), keys[:visible])[0]
        assert full[token].tolist() == best(scores, FLASH6.index_topk)
        padded = torch.nn.functional.pad(scores, (0, -visible % 8), value=-torch.inf).unflatten(0, (-1, 8)).amax(1)
        padded[(visible - 1) // 8] = torch.inf
        blocks = torch.tensor(best(padded, FLASH6.candidate_topk_blocks))
        allowed = torch.zeros(LONG + 8, dtype=torch.bool)
        allowed[(blocks.unsqueeze(-1) * 8 + torch.arange(8)).flatten()] = True
        assert int(allowed.sum()) == kept < visible
        expected = best(scores.masked_fill(~allowed[:visible], -torch.inf), FLASH6.index_topk)
        assert restricted[token].tolist() == expected
        mask = ctx.capture.tensors["layer.03.candidate_mask"][token]
        assert_equal_bits(mask[:visible], allowed[:visible], "mask")
    # The best entry of every block decides here, so that both layers select alike: another mask shows the restriction.
    assert ctx.candidate_blocks is not None
    ctx.candidate_blocks = ~ctx.candidate_blocks
    other = select_entries(ctx, REINDEX, queries)
    assert not set(other[0].tolist()) & set(full[0].tolist())


@pytest.mark.conform
@pytest.mark.parametrize("score", [index_scores, fast_index_scores], ids=["exact", "fast"])
def test_40000_entries_under_any_budget_give_the_same_bits(score: Callable[..., Tensor]) -> None:
    def selections(budget: int) -> list[Tensor]:
        ctx = long_context(FLASH6, LONG, 6, max_logits_bytes=budget)
        queries = index_queries_of(6)
        return [select_entries(ctx, layer, queries, score) for layer in (FULL, REINDEX)]

    expected = selections(512 << 20)
    for budget in (0, 10 << 20, 20 << 20):
        for found, selection in zip(selections(budget), expected, strict=True):
            assert_equal_bits(found, selection, f"budget {budget}")


PEAK = """
from pathlib import Path
def peak():  # of this program alone: getrusage also knows the process that started it
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) >> 10
"""

SELECTION_GROWTH = """
import torch
from v41_config import FLASH6
from v41_goldens.fixtures.long_context import long_context
from v41_goldens.indexer import IndexQueries, select_entries
torch.set_num_threads(1)
queries = IndexQueries(torch.ones(96, 32, 128).bfloat16(), torch.ones(96, 32).bfloat16())
warm = long_context(FLASH6, 4000)
select_entries(warm, FLASH6.layers[3], IndexQueries(queries.q[:1], queries.weights[:1]))
ctx = long_context(FLASH6, 40_000, 96, max_logits_bytes={budget} << 20)
before = peak()
select_entries(ctx, FLASH6.layers[3], queries)
print(peak() - before)
"""

DECODE_PEAK = """
import torch
from v41_config import FLASH6
from v41_goldens import block
from v41_goldens.fixtures.long_context import long_context, random_streams
from v41_goldens.fixtures.random_layer import random_layer
torch.set_num_threads(1)
ctx = long_context(FLASH6, 1_048_576)
streams, _ = block(ctx, FLASH6.layers[3], random_layer(FLASH6, 3), *random_streams(FLASH6, 1))
selected = ctx.topk[3][0]
assert streams.isfinite().all() and (selected >= 0).all() and selected.max() > 1_000_000
assert int(ctx.candidate_blocks.sum()) == 2048
print(peak())
"""


def megabytes_printed(script: str) -> int:
    """What a script of its own process says of its peak memory, in MiB."""
    done = subprocess.run([sys.executable, "-c", PEAK + script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.conform
def test_the_budget_bounds_the_memory_of_a_selection() -> None:
    """Keys of a tile, decoded, come on top of the budget: 32 MiB are plenty. A larger budget is made use of."""
    growth = {budget: megabytes_printed(SELECTION_GROWTH.format(budget=budget)) for budget in (0, 64, 512)}
    assert growth[0] <= 32
    assert growth[64] <= 64 + 32
    assert 64 + 32 < growth[512] <= 512


@pytest.mark.conform
def test_one_token_at_a_million_tokens_of_context_fits_4_gib() -> None:
    assert megabytes_printed(DECODE_PEAK) < 4096
