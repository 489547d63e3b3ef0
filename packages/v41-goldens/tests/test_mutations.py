"""Wrong answers, and the judges that must reject them. `docs/mutations.md` is the table of what happens here.

A mutation of the source executes one of the goldens' modules anew with a change in it; a mutation of a result changes
what a golden gave. Each judge that is shown the wrong answer is shown the right one too, and has to accept that.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from importlib.abc import InspectLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from v41_config import TINY, LayerConfig, ModelConfig, ParallelLayout
from v41_goldens import ATTENTION, Capture, ForwardContext, LayerWeights, ReferenceEngine, judges
from v41_goldens.attention_stages import project_queries, publish_compressed
from v41_goldens.judges import Verdict
from v41_goldens.quantisers import quantize_window_kv
from v41_goldens.rms_norm import rms_norm

DOCUMENT = Path(__file__).parents[1] / "docs" / "mutations.md"
MakeLayer = Callable[[ModelConfig, int, int], LayerWeights]
Verdicts = dict[str, Verdict]
"""Verdicts on one answer, by the name of the judge."""

NUMBERS = itertools.count()


class Source(InspectLoader):
    """Loads a module from a text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def get_source(self, fullname: str) -> str:
        return self.text


def executed_anew(module: ModuleType, *changes: tuple[str, str]) -> ModuleType:
    """`module` from its own source; the first text of each change must stand there exactly once, and is replaced."""
    text = inspect.getsource(module)
    for old, new in changes:
        assert text.count(old) == 1, f"{module.__name__} has {text.count(old)} times {old!r}"
        text = text.replace(old, new)
    spec = spec_from_loader(f"{module.__name__}_{next(NUMBERS)}", Source(text))
    assert spec is not None
    assert spec.loader is not None
    mutant = module_from_spec(spec)
    sys.modules[spec.name] = mutant  # dataclasses look their module up
    spec.loader.exec_module(mutant)
    return mutant


def quantisers_with(number_formats: ModuleType) -> ModuleType:
    """The quantisers on top of a number formats module that may be mutated."""
    import_of = ("from v41_goldens.number_formats import", f"from {number_formats.__name__} import")
    return executed_anew(import_module("v41_goldens.quantisers"), import_of)


@dataclass
class AttentionLayer:
    """A layer's attention as its golden left it."""

    ctx: ForwardContext
    layer: LayerConfig
    weights: LayerWeights
    x: Tensor
    output: Tensor
    captured: dict[str, Tensor]

    def tensor(self, name: str) -> Tensor:
        return self.captured[f"layer.{self.layer.layer_id:02d}.{name}"].clone()

    @property
    def visible(self) -> Tensor:
        assert self.layer.kv_source is not None
        return self.ctx.metadata.compressed_lens[self.layer.kv_source]


class Golden:
    """Right answers at TINY's dimensions."""

    def __init__(self, make_layer: MakeLayer) -> None:
        self._make_layer = make_layer

    def normal(self, *shape: int, seed: int = 0) -> Tensor:
        """BF16 random numbers."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()

    def weights(self, layer_id: int) -> LayerWeights:
        return self._make_layer(TINY, layer_id, 11)

    def context(self, tokens: int) -> ForwardContext:
        return ReferenceEngine(TINY, None, 1, tokens, shuffle_seed=2, fill_byte=0xFF).context([0], [tokens])

    @cached_property
    def full(self) -> AttentionLayer:
        """C1A Full, the candidate source."""
        return self._attention(self.context(96), 6)

    @cached_property
    def reindex(self) -> AttentionLayer:
        """C1A Reindex, behind `full`."""
        return self._attention(self.full.ctx, 8)

    def _attention(self, ctx: ForwardContext, layer_id: int) -> AttentionLayer:
        capture, layer, weights = Capture(), TINY.layer_config(layer_id), self.weights(layer_id)
        x = self.normal(96, TINY.hidden_size, seed=layer_id)
        ctx.capture = capture
        output = ATTENTION[layer.mode](ctx, layer, weights.attention, x)
        ctx.capture = None
        return AttentionLayer(ctx, layer, weights, x, output, capture.tensors)


@dataclass(frozen=True)
class Mutation:
    """`change` is a description, or (old, new) pieces of the source of `module`; `judge` has to reject the answer."""

    name: str
    section: str
    judge: str
    module: ModuleType | None
    change: str | tuple[tuple[str, str], ...]
    answer: Callable[..., Verdicts]

    def verdicts(self, golden: Golden, *, wrong: bool) -> Verdicts:
        if self.module is None:
            return self.answer(golden, wrong)
        assert isinstance(self.change, tuple)
        return self.answer(golden, executed_anew(self.module, *self.change) if wrong else self.module)


MUTATIONS: list[Mutation] = []
Answer = Callable[..., Verdicts]


def of_source(
    name: str, section: str, judge: Callable[..., Verdict], module: str, *change: tuple[str, str]
) -> Callable[[Answer], Answer]:
    """The decorated function takes the module, mutated or not, and has its results judged."""

    def register(answer: Answer) -> Answer:
        source = import_module(f"v41_goldens.{module}")
        MUTATIONS.append(Mutation(name, section, judge.__name__, source, change, answer))
        return answer

    return register


def of_result(name: str, section: str, judge: Callable[..., Verdict], change: str) -> Callable[[Answer], Answer]:
    """The decorated function is told whether to be wrong."""

    def register(answer: Answer) -> Answer:
        MUTATIONS.append(Mutation(name, section, judge.__name__, None, change, answer))
        return answer

    return register


def outputs(actual: Tensor, expected: Tensor) -> Verdicts:
    """An operator's output, by every judge of numbers."""
    return {
        judge.__name__: judge(actual, expected)
        for judge in (judges.judge_row_bounds, judges.judge_relative_budget, judges.judge_equal_bits)
    }


def selections(selection: Tensor, layer: AttentionLayer) -> Verdicts:
    """A selection of an index source, with the golden's own output."""
    candidates = None
    if layer.layer.candidate_source is not None:
        assert layer.ctx.candidate_blocks is not None
        candidates = layer.ctx.candidate_blocks.repeat_interleave(TINY.candidate_block_size, dim=1)[:, :96]
    scores = judges.reference_index_scores(layer.ctx, layer.layer, layer.weights.attention, layer.x)
    return {
        "judge_selection": judges.judge_selection(
            selection, scores, layer.visible, TINY.index_topk, candidates=candidates
        ),
        "judge_selected_attention": judges.judge_selected_attention(
            layer.output, selection, layer.ctx, layer.layer, layer.weights.attention, layer.x
        ),
    }


@of_result("swapped rows", "13", judges.judge_row_bounds, "two tokens' rows of an attention output exchanged")
def swapped_rows(golden: Golden, wrong: bool) -> Verdicts:
    output = golden.full.output.clone()
    if wrong:
        output[[30, 31]] = output[[31, 30]]
    return outputs(output, golden.full.output)


@of_result("one bad row among 4,096", "6", judges.judge_row_bounds, "one row of an RMSNorm output 3 % too large")
def one_bad_row(golden: Golden, wrong: bool) -> Verdicts:
    expected = rms_norm(golden.normal(4096, TINY.hidden_size), golden.weights(0).attn_norm, TINY.rms_norm_eps)
    actual = expected.clone()
    if wrong:
        actual[1234] = (actual[1234].float() * 1.03).bfloat16()
    return outputs(actual, expected)


@of_result("one bad element", "6", judges.judge_row_bounds, "one element of a row off by 8 % of the row's RMS")
def one_bad_element(golden: Golden, wrong: bool) -> Verdicts:
    expected = rms_norm(golden.normal(64, TINY.hidden_size), golden.weights(0).attn_norm, TINY.rms_norm_eps)
    actual = expected.clone()
    if wrong:
        actual[5, 7] += 0.08 * expected[5].float().square().mean().sqrt()
    return outputs(actual, expected)


@of_result("every row a little too large", "6", judges.judge_relative_budget, "an RMSNorm output 1.5 % too large")
def every_row(golden: Golden, wrong: bool) -> Verdicts:
    expected = rms_norm(golden.normal(64, TINY.hidden_size), golden.weights(0).attn_norm, TINY.rms_norm_eps).float()
    return outputs(expected * (1.015 if wrong else 1.0), expected)


@of_result("NaN", "12", judges.judge_row_bounds, "one element of an attention output is NaN")
def one_nan(golden: Golden, wrong: bool) -> Verdicts:
    output = golden.full.output.clone()
    if wrong:
        output[40, 3] = math.nan
    return outputs(output, golden.full.output)


@of_result("stale sentinel, active row", "13", judges.judge_row_bounds, "a row of the destination never written")
def stale_active_row(golden: Golden, wrong: bool) -> Verdicts:
    output = golden.full.output.clone()
    if wrong:
        output[95] = 7.0
    return outputs(output, golden.full.output)


@of_result("stale sentinel, inactive shard", "18", judges.judge_zero_shards, "padding of a rank's slab not cleared")
def stale_inactive_row(golden: Golden, wrong: bool) -> Verdicts:
    layout, (capacity, active) = ParallelLayout(tp=4), (32, 24)
    slabs = torch.zeros(capacity, TINY.hidden_size)
    slabs[:active] = golden.full.output[:active]
    if wrong:
        slabs[active:] = 7.0
    shards = slabs.split(layout.slab_rows(capacity))
    return {
        "judge_zero_shards": judges.judge_zero_shards(shards, layout, capacity, active),
        "judge_zero_rows": judges.judge_zero_rows(slabs, active),
    }


@of_result("padding rows written", "17", judges.judge_untouched_rows, "rows behind the active ones cleared, not left")
def padding_written(golden: Golden, wrong: bool) -> Verdicts:
    before = torch.full((99, TINY.hidden_size), 7.0)
    after = torch.cat([golden.full.output, before[96:]])
    if wrong:
        after[96:] = 0.0
    return {"judge_untouched_rows": judges.judge_untouched_rows(after, before, 96)}


@of_source("transposed comb", "5", judges.judge_row_bounds, "hyper_connections",
           ("comb[:, j, :, None]", "comb[:, :, j, None]"))  # fmt: skip
def transposed_comb(golden: Golden, module: ModuleType) -> Verdicts:
    x_hc, y = golden.normal(48, TINY.hc_mult, TINY.hidden_size), golden.normal(48, TINY.hidden_size, seed=1)

    def expand(m: ModuleType) -> Tensor:
        _, post, comb = m.mhc_mixes(x_hc, golden.weights(0).hc_attn, TINY)
        streams: Tensor = m.mhc_post(y, x_hc, post, comb)
        return streams

    return outputs(expand(module), expand(import_module("v41_goldens.hyper_connections")))


def block_outputs(golden: Golden, module: ModuleType) -> Verdicts:
    """The streams behind a layer of sliding-window attention."""
    x_hc, pre_mix = golden.normal(24, TINY.hc_mult, TINY.hidden_size), golden.normal(24, TINY.hc_mult).float().sigmoid()

    def streams(m: ModuleType) -> Tensor:
        x: Tensor = m.block(golden.context(24), TINY.layer_config(0), golden.weights(0), x_hc, pre_mix)[0]
        return x

    return outputs(streams(module), streams(import_module("v41_goldens.block")))


@of_source("un-staggered pre-mix, attention", "5", judges.judge_row_bounds, "block",
           ("mhc_pre(x_hc, pre_mix)", "mhc_pre(x_hc, attn_pre)"))  # fmt: skip
def unstaggered_attention(golden: Golden, module: ModuleType) -> Verdicts:
    return block_outputs(golden, module)


@of_source("un-staggered pre-mix, MoE", "5", judges.judge_row_bounds, "block",
           ("mhc_pre(x_hc, attn_pre)", "mhc_pre(x_hc, ffn_pre)"))  # fmt: skip
def unstaggered_moe(golden: Golden, module: ModuleType) -> Verdicts:
    return block_outputs(golden, module)


@of_source("route weight after w2", "14.2", judges.judge_row_bounds, "experts",
           ("config.swiglu_limit, route_weights[order].unsqueeze(-1))", "config.swiglu_limit)"),
           ("[order] = down", "[order] = (route_weights[order].unsqueeze(-1) * down).to(torch.bfloat16)"),
           )  # fmt: skip
def late_route_weight(golden: Golden, module: ModuleType) -> Verdicts:
    rows, experts = golden.normal(64, TINY.hidden_size), golden.weights(0).moe.experts
    ids, weights = torch.arange(64) % TINY.n_routed_experts, torch.linspace(0.05, 1.5, 64)

    def routed(m: ModuleType) -> Tensor:
        y: Tensor = m.routed_experts(rows, ids, weights, experts, TINY)
        return y

    return outputs(routed(module), routed(import_module("v41_goldens.experts")))


@of_source("missing YaRN", "7", judges.judge_row_bounds, "rope", ('if profile == "swa":', "if True:"))
def missing_yarn(golden: Golden, module: ModuleType) -> Verdicts:
    q = golden.normal(200, TINY.num_attention_heads, TINY.head_dim)

    def rotated(m: ModuleType) -> Tensor:
        turned: Tensor = m.apply_rope(q, *m.precompute_rope_tables(TINY, "compressed", len(q)))
        return turned

    return outputs(rotated(module), rotated(import_module("v41_goldens.rope")))


@of_result("off-by-one group position", "9", judges.judge_equal_bits, "a pair rotated at its second token's position")
def late_group_position(golden: Golden, wrong: bool) -> Verdicts:
    layer, x = TINY.layer_config(2), golden.normal(64, TINY.hidden_size)

    def published(late: bool) -> Tensor:
        ctx = golden.context(64)
        if late:
            positions = ctx.metadata.compressed_rope_position_ids
            later = {source: torch.where(p >= 0, p + 1, p) for source, p in positions.items()}
            ctx.metadata = dataclasses.replace(ctx.metadata, compressed_rope_position_ids=later)
        publish_compressed(ctx, layer, golden.weights(2).attention, x)
        rows = ctx.metadata.compressed_slots[2]
        return ctx.caches.compressed[2].read(rows[rows >= 0])

    return outputs(published(wrong), published(False))


@of_source("sink in the numerator", "12", judges.judge_row_bounds, "sparse_attention",
           ("(accumulator / denominator)", "((accumulator + exp(sink.view(-1, 1) - maximum)) / denominator)"),
           )  # fmt: skip
def sink_in_numerator(golden: Golden, module: ModuleType) -> Verdicts:
    layer = golden.full
    _, q = project_queries(layer.ctx, layer.layer, layer.weights.attention, layer.x)
    rows = layer.ctx.metadata.window_indices
    kv, sink = layer.ctx.caches.window[6].read(rows), layer.weights.attention.attn_sink

    def attended(m: ModuleType) -> Tensor:
        out: Tensor = m.sparse_attention(q, kv, rows >= 0, sink, TINY.head_dim**-0.5)
        return out

    return outputs(attended(module), attended(import_module("v41_goldens.sparse_attention")))


def quantised(x: Tensor, number_formats: ModuleType, kind: str) -> Verdicts:
    """A quantiser on top of `number_formats`: its decoded rows, and whether codes and scales are the golden's."""
    golden = import_module("v41_goldens.quantisers")
    found = getattr(quantisers_with(number_formats), f"quantize_{kind}")(x)
    expected = getattr(golden, f"quantize_{kind}")(x)
    decode = getattr(golden, f"dequantize_{kind}")
    bits = [judges.judge_equal_bits(f, e) for f, e in zip(found, expected, strict=True)]
    return outputs(decode(found), decode(expected)) | {"judge_equal_bits": min(bits, key=bool)}


@of_source("ties rounded toward zero", "2.3", judges.judge_equal_bits, "number_formats",
           ("magnitude.mul_(inverse_step).round_()", "magnitude.mul_(inverse_step).sub_(0.5).ceil_()"))  # fmt: skip
def ties_toward_zero(golden: Golden, module: ModuleType) -> Verdicts:
    return quantised(golden.normal(48, TINY.head_dim), module, "index")


@of_source("scale one exponent low", "2.2", judges.judge_equal_bits, "number_formats",
           ("(magnitude + 0x7FFFFF)", "magnitude.clone()"))  # fmt: skip
def low_scale(golden: Golden, module: ModuleType) -> Verdicts:
    return quantised(golden.normal(48, TINY.head_dim), module, "window_kv")


@of_source("slot -1 writes the last row", "16", judges.judge_storage, "paged_cache",
           ("live = slots >= 0", "live = slots >= -1"))  # fmt: skip
def hole_written(golden: Golden, module: ModuleType) -> Verdicts:
    caches = golden.full.ctx.caches
    cache = module.RowCache(caches.window[6].payload.clone(), caches.window[6].scale.clone(), caches.window[6].decode)
    tensors = {"payload": cache.payload, "scale": cache.scale}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    slots = torch.tensor([5, -1, 17])
    cache.publish(slots, quantize_window_kv(golden.normal(3, TINY.head_dim)))
    return {"judge_storage": judges.judge_storage(before, tensors, dict.fromkeys(tensors, slots))}


@of_result("duplicated index", "10", judges.judge_selection, "an entry selected twice, another one not at all")
def duplicated_index(golden: Golden, wrong: bool) -> Verdicts:
    selection = golden.full.tensor("topk")
    if wrong:
        selection[90, 4] = selection[90, 3]
    return selections(selection, golden.full)


@of_result("non-causal index", "10", judges.judge_selection, "a token selects the entry of the next one")
def non_causal_index(golden: Golden, wrong: bool) -> Verdicts:
    selection = golden.full.tensor("topk")
    if wrong:
        selection[80, -1] = 81
    return selections(selection, golden.full)


@of_result("physical row for an entry", "10", judges.judge_selection, "rows of the cache where entries are expected")
def physical_rows(golden: Golden, wrong: bool) -> Verdicts:
    return selections(golden.full.ctx.topk[6] + 128 if wrong else golden.full.tensor("topk"), golden.full)


@of_source("ties to the higher index", "3", judges.judge_selection, "top_k",
           ("torch.arange(count - 1, -1, -1, device", "torch.arange(count, device"))  # fmt: skip
def ties_to_the_higher(golden: Golden, module: ModuleType) -> Verdicts:
    selection = module.select_positions(golden.full.tensor("index_score"), TINY.index_topk)
    return {"judge_selection": selections(selection, golden.full)["judge_selection"]}


@of_source("candidates ignored", "11", judges.judge_selection, "indexer",
           ("if layer.candidate_source is not None:", "if False:"))  # fmt: skip
def candidates_ignored(golden: Golden, module: ModuleType) -> Verdicts:
    layer = golden.reindex
    indexer_weights = layer.weights.attention.indexer
    assert indexer_weights is not None
    qr, _ = project_queries(layer.ctx, layer.layer, layer.weights.attention, layer.x)
    queries = module.index_queries(qr, layer.x, indexer_weights, *layer.ctx.query_rope(layer.layer), TINY)
    return selections(module.select_entries(layer.ctx, layer.layer, queries), layer)


@of_source("newest block not pinned", "11", judges.judge_candidate_blocks, "candidate_blocks",
           ("torch.where(block == newest, torch.inf, score)", "score"))  # fmt: skip
def newest_not_pinned(golden: Golden, module: ModuleType) -> Verdicts:
    scores, visible = golden.full.tensor("index_score"), golden.full.visible
    kept = module.candidate_blocks(scores, visible, TINY).kept
    mask = kept.repeat_interleave(TINY.candidate_block_size, dim=1)[:, : scores.shape[1]]
    return {
        "judge_candidate_blocks": judges.judge_candidate_blocks(kept, scores, visible, TINY),
        "judge_candidate_mask": judges.judge_candidate_mask(mask, scores, visible, TINY),
    }


@of_result("block kept in part", "11", judges.judge_candidate_mask, "one visible entry taken out of a kept block")
def block_in_part(golden: Golden, wrong: bool) -> Verdicts:
    mask = golden.full.tensor("candidate_mask")
    if wrong:
        mask[90, int(mask[90].int().argmax()) + 3] = False
    scores = golden.full.tensor("index_score")
    return {"judge_candidate_mask": judges.judge_candidate_mask(mask, scores, golden.full.visible, TINY)}


@of_result("output of another selection", "12", judges.judge_selected_attention,
           "selection and output valid, but not of each other")  # fmt: skip
def output_of_another(golden: Golden, wrong: bool) -> Verdicts:
    layer = golden.full
    rest = (layer.ctx, layer.layer, layer.weights.attention, layer.x)
    slack = judges.CutoffRule("any", slack=10.0)
    selection = layer.tensor("topk")
    others = (judges.reference_index_scores(*rest)[90] > -math.inf).nonzero().flatten().int()
    selection[90] = others[: TINY.index_topk]
    output = layer.output if wrong else judges.rederive_attention(*rest, selection)
    return {"judge_selected_attention": judges.judge_selected_attention(output, selection, *rest, cutoff=slack)}


Outcomes = Callable[[Mutation], tuple[Verdicts, Verdicts]]


@pytest.fixture(scope="module")
def outcomes(make_layer: MakeLayer) -> Outcomes:
    """The verdicts on the right and on the wrong answer of a mutation."""
    golden = Golden(make_layer)

    @cache
    def of(name: str) -> tuple[Verdicts, Verdicts]:
        mutation = next(m for m in MUTATIONS if m.name == name)
        return mutation.verdicts(golden, wrong=False), mutation.verdicts(golden, wrong=True)

    return lambda mutation: of(mutation.name)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_is_rejected_by_its_judge(outcomes: Outcomes, mutation: Mutation) -> None:
    right, wrong = outcomes(mutation)
    assert right.keys() == wrong.keys()
    for judge, verdict in right.items():
        assert verdict, f"{judge} rejects the right answer"
    assert not wrong[mutation.judge], wrong[mutation.judge]


def test_every_judge_rejects_something(outcomes: Outcomes) -> None:
    rejecting = {name for mutation in MUTATIONS for name, verdict in outcomes(mutation)[1].items() if not verdict}
    assert rejecting == {name for name in judges.__all__ if name.startswith("judge_")}


def test_names_are_unique_and_a_change_that_does_not_fit_is_refused() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    module = import_module("v41_goldens.rms_norm")
    for text in ("not in the source", "values"):
        with pytest.raises(AssertionError, match=r"v41_goldens\.rms_norm has"):
            executed_anew(module, (text, ""))


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ("---",) * len(header), *rows))


def listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def judge_table() -> str:
    """Every judge with the first sentences of its documentation."""
    names = [name for name in judges.__all__ if name.startswith("judge_")]
    summaries = [(inspect.getdoc(getattr(judges, name)) or "").split("\n\n")[0] for name in names]
    return table(
        ("judge", "accepts"),
        [(f"`{n}`", " ".join(summary.split())) for n, summary in zip(names, summaries, strict=True)],
    )


def mutation_table(outcomes: Outcomes) -> str:
    rows = []
    for mutation in MUTATIONS:
        change = mutation.change
        if not isinstance(change, str):
            assert mutation.module is not None
            pieces = "; ".join(f"`{old}` → `{new}`" for old, new in change)
            change = f"`{mutation.module.__name__.rpartition('.')[2]}`: {pieces}"
        rejecting = [name for name, verdict in outcomes(mutation)[1].items() if not verdict]
        accepting = [name for name, verdict in outcomes(mutation)[1].items() if verdict]
        rejecting.remove(mutation.judge)
        rows.append(
            (mutation.name, mutation.section, change, listed([mutation.judge]), listed(rejecting), listed(accepting))
        )
    return table(("mutation", "section", "change", "caught by", "also rejected by", "not seen by"), rows)


def test_the_document_shows_what_happens_here(outcomes: Outcomes, tmp_path: Path) -> None:
    expected = [judge_table(), mutation_table(outcomes)]
    found = re.findall(r"^\|.*(?:\n\|.*)*", DOCUMENT.read_text(), re.MULTILINE)
    current = tmp_path / "mutations.md"
    current.write_text("\n\n".join(expected) + "\n")
    assert found == expected, f"{DOCUMENT.name} is not up to date: its tables are those of {current}"
