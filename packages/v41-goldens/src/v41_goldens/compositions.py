"""What is composed of operators: a complete block of each mode, the whole forward, and the boundary alone.

Each has a self-test that puts the same thing together in a second way and compares to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from v41_config import AttentionMode
from v41_goldens.block import block, entry_streams
from v41_goldens.fixtures import FixtureBatch, FixtureCase, fixture_batch
from v41_goldens.fixtures.batch import selection
from v41_goldens.fixtures.random_layer import random_checkpoint, random_layer, random_model
from v41_goldens.fixtures.random_tensors import RandomTensors
from v41_goldens.forward_context import ForwardContext
from v41_goldens.golden_run import Check, GoldenRun
from v41_goldens.greedy import greedy_tokens
from v41_goldens.hyper_connections import mhc_mixes, mhc_post, mhc_pre
from v41_goldens.judges import judge_equal_bits, judge_row_bounds
from v41_goldens.linear import fp32_linear
from v41_goldens.model import boundary_logits
from v41_goldens.modes import ATTENTION, first_layer
from v41_goldens.moe import moe
from v41_goldens.reference_engine import ReferenceEngine
from v41_goldens.rms_norm import rms_norm
from v41_goldens.rope_rows import RopeRows
from v41_goldens.weights import ModelWeights


@dataclass(frozen=True)
class Composition:
    """A name for lists, what it computes, and its self-test."""

    name: str
    doc: str
    validate: Callable[[FixtureCase], GoldenRun]


def _context(case: FixtureCase, batch: FixtureBatch) -> ForwardContext:
    return ForwardContext(case.config, batch.metadata, batch.caches, RopeRows(batch.tables))


def _validate_block(mode: AttentionMode, case: FixtureCase) -> GoldenRun:
    """`block`, against its two halves written out with the delayed pre-mix: each sublayer collapses with what the one
    before has computed, and hands its own on."""
    config = case.config
    layer, eps = first_layer(config, mode, f"block_{mode.value}"), config.rms_norm_eps
    weights, random = random_layer(config, layer.layer_id, case.seed), RandomTensors(case.seed)
    tokens = case.active(0)
    x_hc = random.normal("x_hc", (tokens, config.hc_mult, config.hidden_size)).bfloat16()
    pre_mix = random.normal("pre_mix", (tokens, config.hc_mult)).sigmoid()
    contexts = []
    for _ in range(2):
        batch = fixture_batch(case, source_is_done=not layer.owns_kv)
        context = _context(case, batch)
        if layer.index_source is not None and not layer.owns_index:
            context.topk[layer.index_source] = selection(batch, layer, config, random)
        if layer.candidate_source is not None:
            lens = batch.metadata.compressed_lens[layer.candidate_source]
            blocks = -(-int(lens.max()) // config.candidate_block_size) if len(lens) else 0
            context.candidate_blocks = torch.ones(len(lens), blocks, dtype=torch.bool)
        contexts.append(context)
    with torch.inference_mode():
        found = block(contexts[0], layer, weights, x_hc, pre_mix)
        attn_pre, post, comb = mhc_mixes(x_hc, weights.hc_attn, config)
        attn_in = rms_norm(mhc_pre(x_hc, pre_mix), weights.attn_norm, eps)
        attn_out = ATTENTION[mode](contexts[1], layer, weights.attention, attn_in).bfloat16()
        streams = mhc_post(attn_out, x_hc, post, comb)
        ffn_pre, post, comb = mhc_mixes(streams, weights.hc_ffn, config)
        moe_out = moe(rms_norm(mhc_pre(streams, attn_pre), weights.ffn_norm, eps), weights.moe, config)
        expected = mhc_post(moe_out, streams, post, comb), ffn_pre
    flat = found[0].flatten(1)
    return GoldenRun((
        Check("x_hc", judge_equal_bits(found[0], expected[0])),
        Check("x_hc", judge_row_bounds(flat, flat)),
        Check("pre_mix", judge_equal_bits(found[1], expected[1])),
    ))  # fmt: skip


def _validate_forward(case: FixtureCase) -> GoldenRun:
    """Every layer: prompts in chunks with a decode step behind them, against each request alone in one step."""
    config = case.config
    weights, random = random_model(config, case.seed), RandomTensors(case.seed)
    length = max(2, case.active(0) // case.requests) + 2  # three chunks, the last of one token
    prompts = [
        random.integers(f"prompt {r}", 0, config.vocab_size, (length + r,)).tolist() for r in range(case.requests)
    ]
    together = ReferenceEngine(
        config, weights, case.requests, length + case.requests + 1, shuffle_seed=1, fill_byte=0xFF
    )
    rows: list[list[Tensor]] = [[] for _ in prompts]
    for start, stop in ((0, 3), (3, -1), (-1, None)):
        batch = [(request, prompt[start:stop]) for request, prompt in enumerate(prompts)]
        logits = together.step(batch).logits.split([len(part) for _, part in batch])
        for collected, part in zip(rows, logits, strict=True):
            collected.append(part)
    checks = []
    for request, prompt in enumerate(prompts):
        alone = ReferenceEngine(config, weights, 1, len(prompt)).step([(0, prompt)]).logits
        checks.append(Check(f"logits of request {request}", judge_equal_bits(torch.cat(rows[request]), alone)))
        checks.append(Check(f"logits of request {request}", judge_row_bounds(alone, alone)))
    return GoldenRun(tuple(checks))


def _validate_boundary(case: FixtureCase) -> GoldenRun:
    """Embed, collapse, norm and head without a layer between: the collapse gives the embedding back to the bit."""
    config, random = case.config, RandomTensors(case.seed)
    tensors = random_checkpoint(config, None, case.seed)
    embed, norm, head = (tensors[name] for name in ("embed.weight", "norm.weight", "head.weight"))
    ids = random.integers("token_ids", 0, config.vocab_size, (case.active(0),))
    with torch.inference_mode():
        logits = boundary_logits(ids, ModelWeights(embed, (), norm, head), config)
        collapsed = mhc_pre(*entry_streams(embed[ids], config.hc_mult))
        expected = fp32_linear(rms_norm(embed[ids], norm, config.rms_norm_eps), head)
    return GoldenRun((
        Check("collapsed", judge_equal_bits(collapsed, embed[ids])),
        Check("logits", judge_equal_bits(logits, expected)),
        Check("token_ids", judge_equal_bits(greedy_tokens(logits), expected.argmax(1))),
    ))  # fmt: skip


def _block_composition(mode: AttentionMode) -> Composition:
    return Composition(
        f"block_{mode.value}",
        f"A complete layer: {mode.title} attention and MoE with the delayed pre-mix (model.md section 5).",
        lambda case: _validate_block(mode, case),
    )


COMPOSITIONS: Mapping[str, Composition] = MappingProxyType({
    composition.name: composition
    for composition in (
        *(_block_composition(mode) for mode in AttentionMode),
        Composition("forward", "Every layer, from ids to logits (model.md sections 4 and 15).", _validate_forward),
        Composition("boundary_fwd", "Embed, collapse, norm and head without a layer between (model.md sections 4 and "
                    "15).", _validate_boundary),
    )
})  # fmt: skip
"""By name."""
