"""The acceptance list of the sequence-parallel layout, a test a line; docs/sequence_parallel.md has the list.

All layouts of one to eight ranks on a model that each of them divides, with FLASH's six experts per token: ragged
requests over unequal DP groups, prefill and decode, beside the single-process golden. The checks are functions that
name what is wrong, so that the wrong variants at the end can show that they find it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import v41_model.rank_forward
import v41_model.rank_layer
from v41_config import (
    FLASH,
    AttentionMode,
    GatheredRows,
    LayerConfig,
    LocalRows,
    ModelConfig,
    ParallelLayout,
    SlabError,
)
from v41_goldens.gate import GateOutput
from v41_goldens.weights import LayerWeights, ModelWeights, MoeWeights
from v41_loader import Checkpoint, open_checkpoint, synthesize_checkpoint
from v41_model import rank_communicator
from v41_model.collective_log import CollectiveKind, CollectiveRecord, Site
from v41_model.communicator import Communicator, sum_in_rank_order
from v41_model.expert_parallel import ExpertParallelOutput, expert_parallel_moe
from v41_model.generation import GroupStep, Request, admit, advance
from v41_model.golden_twin import GoldenTwin, same_bits
from v41_model.layout_table import OperatorTrace
from v41_model.local_world import LocalWorld
from v41_model.operators import Operators
from v41_model.rank_layer import RankStep, ResidualStreams, sequence_parallel_layer
from v41_model.session import ModelSession
from v41_model.wiring import ShardedBoundary, Wiring

MODEL = FLASH.scaled(num_hidden_layers=6, layout=ParallelLayout(tp=8))
"""A layer of each attention mode, six experts per token, heads and groups for eight ranks."""
LAYOUTS = [(1, 1), (2, 2), (4, 1), (4, 2), (8, 1)]
RAGGED = [13, 1, 21, 6, 2]
EXAMPLE = [3, 2, 3, 3, 2, 3]
"""Requests A to F: two DP groups of eight tokens each."""
TP4_DP2 = ParallelLayout(4, 2)
K = MODEL.num_experts_per_tok
LAYERS = range(MODEL.num_hidden_layers)


@dataclass(frozen=True)
class Crossing:
    """A TP collective as a rank saw it."""

    kind: str
    rank: int
    site: Site
    sent: Tensor
    received: Tensor


@dataclass
class Run:
    """A prefill and decode steps of one layout, with all that can be observed, and the golden's verdict."""

    session: ModelSession
    requests: list[Request]
    steps: list[list[GroupStep]]
    traces: list[OperatorTrace]
    crossings: list[list[Crossing]]
    records: list[list[list[CollectiveRecord]]]
    """Of each step, the calls of each rank."""
    differences: list[list[str]]

    @property
    def layout(self) -> ParallelLayout:
        return self.session.layout

    def tokens(self, step: int, rank: int) -> int:
        """Tokens on a rank in a step."""
        done = self.steps[step][self.layout.dp_rank(rank)]
        total = sum(count for _, count in done.planned)
        return self.layout.active_rows(total, total, rank)


def run(session: ModelSession, weights: ModelWeights, lengths: list[int], new_tokens: int = 2) -> Run:
    """Ids are all different, so that a token can be recognised by its embedding."""
    random = np.random.default_rng(sum(lengths))
    ids = random.choice(np.arange(3, MODEL.vocab_size), sum(lengths), replace=False)
    prompts = np.split(ids, np.cumsum(lengths)[:-1])
    requests = [Request(tuple(prompt.tolist()), new_tokens) for prompt in prompts]
    crossings: list[Crossing] = []
    for communicator in session.world.communicators:
        for name in ("all_gather_tokens", "reduce_scatter_tokens", "all_reduce"):
            _observe(communicator, name, crossings)
    groups = admit(session, requests)
    twin = GoldenTwin(MODEL, session.layout, weights, requests)
    observed = Run(session, requests, [], [], [], [], [])
    while any(group.has_work for group in groups):
        trace = OperatorTrace(session.world)
        session.operators = trace.observe(Operators())
        steps = advance(session, groups, capture=True)
        observed.steps.append(steps)
        observed.traces.append(trace)
        observed.crossings.append(list(crossings))
        observed.records.append([list(c.log.records) for c in session.world.communicators])
        try:
            observed.differences.append(twin.step(steps))
        except SlabError as error:  # ranks that should agree recorded different values
            observed.differences.append([str(error)])
        crossings.clear()
    return observed


def _observe(communicator: object, name: str, crossings: list[Crossing]) -> None:
    original = getattr(type(communicator), name)

    def observed(sent: Tensor, site: Site) -> Tensor:
        before = sent.clone()
        received: Tensor = original(communicator, sent, site)
        crossings.append(Crossing(name, communicator.rank, site, before, received.clone()))  # type: ignore[attr-defined]
        return received

    setattr(communicator, name, observed)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "scaled"
    synthesize_checkpoint(MODEL, 4105, path)
    return path


@pytest.fixture(scope="module")
def checkpoint(directory: Path) -> Iterator[Checkpoint]:
    with open_checkpoint(directory) as opened:
        yield opened


@pytest.fixture(scope="module")
def weights(checkpoint: Checkpoint) -> ModelWeights:
    return ModelWeights.from_tensors(MODEL, checkpoint.read(checkpoint.names))


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: f"tp{layout[0]}-dp{layout[1]}")
def ragged(request: pytest.FixtureRequest, checkpoint: Checkpoint, weights: ModelWeights) -> Run:
    return run(ModelSession.open(checkpoint, ParallelLayout(*request.param)), weights, RAGGED)


@pytest.fixture(scope="module")
def example(checkpoint: Checkpoint, weights: ModelWeights) -> Run:
    return run(ModelSession.open(checkpoint, TP4_DP2), weights, EXAMPLE)


# --- what can be wrong -----------------------------------------------------------------------------------------------


def residual_crossings(observed: Run) -> list[str]:
    """TP collectives that carry more than a row of D per token, or add anything but attention's partials."""
    faults = []
    for step in observed.crossings:
        for c in step:
            if c.sent.dim() != 2 or c.sent.shape[1] != MODEL.hidden_size:
                faults.append(f"{c.kind} of {list(c.sent.shape)} at {c.site}")
            if c.kind == "all_reduce":
                faults.append(f"all_reduce at {c.site}")
            if c.kind == "reduce_scatter_tokens" and c.site.step not in ("embedding", "attention output"):
                faults.append(f"sum at {c.site}")
    return faults


def reduction_faults(observed: Run) -> list[str]:
    """Attention outputs that are not the FP32 sum of the group's partials in rank order, cut to the rank's slab."""
    faults = []
    for step in observed.crossings:
        by_call: dict[tuple[int, Site], list[Crossing]] = {}
        for c in step:
            if c.site.step == "attention output":
                by_call.setdefault((observed.layout.dp_rank(c.rank), c.site), []).append(c)
        for calls in by_call.values():
            calls.sort(key=lambda c: c.rank)
            total = calls[0].sent.clone()
            for c in calls[1:]:
                total = total + c.sent
            slab = len(total) // observed.layout.tp
            for c in calls:
                start = observed.layout.tp_rank(c.rank) * slab
                if not same_bits(c.received, total[start : start + slab]):
                    faults.append(f"rank {c.rank} at {c.site}")
    return faults


def routed_rows(observed: Run, step: int, layer: int, operator: str = "routed_experts") -> int:
    """Rows that an operator of MoE saw in one layer, over all ranks."""
    calls = [c for rank in range(observed.layout.ep) for c in observed.traces[step].of_layer(rank, layer)]
    return sum(c.arguments[0][0] for c in calls if c.operator == operator)


def route_faults(observed: Run) -> list[str]:
    """Layers in which the experts do not get each token once per chosen expert, or the shared expert not once."""
    faults = []
    for step in range(len(observed.steps)):
        tokens = sum(observed.tokens(step, rank) for rank in range(observed.layout.ep))
        for layer in LAYERS:
            routed, shared = (routed_rows(observed, step, layer, op) for op in ("routed_experts", "shared_expert"))
            if (routed, shared) != (tokens * K, tokens):
                faults.append(f"step {step}, layer {layer}: {routed} routes, {shared} shared rows of {tokens} tokens")
    return faults


# --- the list --------------------------------------------------------------------------------------------------------


def test_entry_gives_every_token_to_exactly_one_rank(ragged: Run, weights: ModelWeights) -> None:
    """Embeddings of the ranks' slabs in rank order are those of the packed ids; the ids differ, so none is double."""
    for dp_rank, step in enumerate(ragged.steps[0]):
        rows = [capture.tensors["embed_out"] for capture in step.output.captures]
        ids = torch.tensor([token for request, count in step.planned for token in request.prompt[:count]])
        assert same_bits(torch.cat(rows), weights.embed[ids.long()] if len(ids) else torch.cat(rows))
        first = dp_rank * ragged.layout.tp
        assert [len(r) for r in rows] == [ragged.tokens(0, first + tp_rank) for tp_rank in range(ragged.layout.tp)]


def test_both_embedding_forms_give_the_same_bits(ragged: Run, weights: ModelWeights) -> None:
    """A whole table is looked up without communication, vocabulary shards are reduce-scattered; all else is equal."""
    ranks = ragged.session._ranks.values()
    whole = [replace(model, weights=replace(model.weights, embed=weights.embed)) for model in ranks]
    replicated = run(ModelSession(whole, LocalWorld(ragged.layout)), weights, RAGGED)
    assert ragged.differences == replicated.differences == [[], []]
    assert [r.generated for r in ragged.requests] == [r.generated for r in replicated.requests]
    kinds = [
        Counter(r.kind for step in observed.records for rank in step for r in rank if r.site.step == "embedding")
        for observed in (ragged, replicated)
    ]
    assert set(kinds[0]) == ({CollectiveKind.TOKEN_REDUCE_SCATTER} if ragged.layout.tp > 1 else set())
    assert not kinds[1]


def test_attention_input_is_equal_inside_a_tp_group_and_packed(ragged: Run) -> None:
    """Every rank of a group gathers the same rows in every layer; groups have their own requests and counts."""
    for step in ragged.crossings:
        gathered = [c for c in step if c.site.step == "attention input"]
        for layer in LAYERS:
            rows = {c.rank: c.received for c in gathered if c.site.layer == layer}
            for rank, received in rows.items():
                assert same_bits(received, rows[ragged.layout.tp_group(rank)[0]])
    counts = [sum(count for _, count in step.planned) for step in ragged.steps[0]]
    assert sum(counts) == sum(RAGGED)
    assert len(set(counts)) == len(counts), "DP groups with different numbers of tokens"
    assert all("attn_in" not in name for step in ragged.differences for name in step)


def test_reduce_scatter_is_the_fp32_sum_in_rank_order_then_the_slab(ragged: Run) -> None:
    assert reduction_faults(ragged) == []
    partials = [c.sent for step in ragged.crossings for c in step if c.site.step == "attention output"]
    assert {p.dtype for p in partials} == {torch.float32}
    assert any(not same_bits(p, p.bfloat16().float()) for p in partials), "nothing is rounded before the sum"
    for step, crossings in zip(ragged.steps, ragged.crossings, strict=True):
        for c in crossings:
            if c.site.step == "attention output":
                capture = step[ragged.layout.dp_rank(c.rank)].output.captures[ragged.layout.tp_rank(c.rank)]
                rounded = capture.tensors[f"layer.{c.site.layer:02d}.attn_out"]
                assert same_bits(rounded, c.received[: len(rounded)].bfloat16()), "rounded once, after the sum"


def test_residual_and_mhc_state_stay_on_their_rank(ragged: Run) -> None:
    """Never summed, never gathered: TP collectives carry rows of D alone, and only attention's partials are added."""
    assert residual_crossings(ragged) == []


def test_residual_rows_are_those_of_the_reduce_scatter(ragged: Run) -> None:
    for step in range(len(ragged.steps)):
        for rank in range(ragged.layout.world_size):
            group = ragged.steps[step][ragged.layout.dp_rank(rank)]
            tensors = group.output.captures[ragged.layout.tp_rank(rank)].tensors
            if group.planned:
                names = [f"layer.{layer:02d}.{name}" for layer in LAYERS for name in ("X", "pre_mix", "attn_out")]
                assert {len(tensors[name]) for name in names} == {ragged.tokens(step, rank)}


def test_the_example_has_sixteen_tokens_and_ninety_six_routes(example: Run) -> None:
    """Six experts per token as in FLASH; the shared expert sees each token once; twelve routes leave every rank."""
    assert K == 6
    assert [example.tokens(0, rank) for rank in range(8)] == [2] * 8
    for layer in LAYERS:
        assert routed_rows(example, 0, layer) == 96
        assert routed_rows(example, 0, layer, "shared_expert") == 16
    sent = [r.sent[0][0] for rank in example.records[0] for r in rank if r.site == Site("expert dispatch", 3)]
    assert sent == [12] * 8
    assert example.differences == [[], []]


def test_the_example_puts_tokens_where_the_table_says(example: Run, weights: ModelWeights) -> None:
    """A0 A1 | A2 B0 | B1 C0 | C1 C2 and the same for D, E, F: slabs cross request boundaries."""
    names = {request.prompt[i]: f"{'ABCDEF'[n]}{i}" for n, request in enumerate(example.requests)
             for i in range(len(request.prompt))}  # fmt: skip
    held = []
    for step in example.steps[0]:
        for capture in step.output.captures:
            matches = (capture.tensors["embed_out"].unsqueeze(1) == weights.embed).all(dim=-1)
            held.append([names[int(row.nonzero())] for row in matches])
    assert held == [["A0", "A1"], ["A2", "B0"], ["B1", "C0"], ["C1", "C2"],
                    ["D0", "D1"], ["D2", "E0"], ["E1", "F0"], ["F1", "F2"]]  # fmt: skip


def test_every_token_is_routed_once_and_shared_once(ragged: Run) -> None:
    """Padding and empty ranks route nothing."""
    assert route_faults(ragged) == []


def test_combine_returns_rows_to_the_rank_they_came_from(ragged: Run) -> None:
    """What a rank gets back is one row for each of its own routes, and its MoE output is the reference's."""
    for step, ranks in enumerate(ragged.records):
        for rank, records in enumerate(ranks):
            back = [r for r in records if r.site.step == "expert combine"]
            assert [r.received[0][0] for r in back] == [ragged.tokens(step, rank) * K] * len(LAYERS)
    assert all("moe_out" not in name for step in ragged.differences for name in step)


def test_streams_and_pre_mix_equal_the_reference_in_every_layer(ragged: Run) -> None:
    """Rebuilt from the slabs: residual streams, mHC state, attention inputs, routes, logits, tokens, to the bit."""
    assert ragged.differences == [[]] * 2
    compared = ragged.steps[0][0].output.captures[0].tensors
    for layer in LAYERS:
        assert {f"layer.{layer:02d}.{name}" for name in ("X", "pre_mix", "attn_in", "router_ids")} <= set(compared)


def test_nothing_crosses_the_tp_group_behind_moe(ragged: Run) -> None:
    """A layer is gather, reduce-scatter and the three EP phases, in this order: no all-reduce, no gather at its end."""
    layer = ["attention input", "attention output", "expert counts", "expert dispatch", "expert combine"]
    for step in ragged.records:
        for records in step:
            inside = [r for r in records if r.site.layer is not None]
            assert {r.kind for r in inside} <= set(CollectiveKind) - {CollectiveKind.ALL_REDUCE}
            busy = any(r.site.step == "attention input" for r in inside)
            expected = [(site, i) for i in LAYERS for site in (layer if busy else layer[2:])]
            assert [(r.site.step, r.site.layer) for r in inside] == expected


def test_ep_collectives_are_the_same_on_all_ranks_whatever_they_hold(ragged: Run) -> None:
    for step in ragged.records:
        sequences = [[(r.kind, r.site) for r in records if r.site.step.startswith("expert")] for records in step]
        assert sequences == [sequences[0]] * ragged.layout.ep
        assert len(sequences[0]) == 3 * len(LAYERS)


@pytest.mark.parametrize("reserve", [0, 5], ids=lambda rows: f"{rows} rows reserved")
def test_the_mapping_closes_from_ids_to_logits(
    ragged: Run, weights: ModelWeights, checkpoint: Checkpoint, reserve: int
) -> None:
    """Six layers: logits of every packed row come back in the packed order, whatever slabs the capacity gives."""
    session = ModelSession.open(checkpoint, ragged.layout)
    requests = [Request(r.prompt, 1) for r in ragged.requests]
    groups = admit(session, requests)
    plans = [group.plan(max_rows=sum(RAGGED)) for group in groups]
    batches = [group.batch(plan) for group, plan in zip(groups, plans, strict=True)]
    capacity = max(len(batch.token_ids) for batch in batches) + reserve
    outputs = session.step(batches, capacity=capacity, all_logits=True, capture=True)
    twin = GoldenTwin(MODEL, ragged.layout, weights, requests)
    steps = []
    for plan, output in zip(plans, outputs, strict=True):
        assert output.logits.shape == (sum(count for _, count in plan), MODEL.vocab_size)
        ids = torch.tensor([i for r, count in plan for i in range(count)], dtype=torch.int32)
        assert same_bits(output.metadata.position_ids, ids)
        for request, count in plan:
            request.stored += count
        steps.append(GroupStep(plan, output, []))
    assert twin.step(steps) == []


CASES = {
    "T not divisible, unequal groups": [5, 3, 7],
    "one request, other groups empty": [9],
    "decode and prefill of fewer tokens than ranks": [1, 2],
    "a token per request": [1, 1, 1],
}


@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("layout", [(4, 2), (8, 1)], ids=str)
def test_ragged_indivisible_short_and_empty_batches(
    checkpoint: Checkpoint, weights: ModelWeights, layout: tuple[int, int], lengths: list[int]
) -> None:
    observed = run(ModelSession.open(checkpoint, ParallelLayout(*layout)), weights, lengths)
    assert observed.differences == [[], []]
    assert route_faults(observed) == residual_crossings(observed) == reduction_faults(observed) == []


def test_all_six_modes_in_prefill_and_decode(ragged: Run) -> None:
    """On every rank of a group that has tokens, and equal to the reference."""
    modes = {f"attn_{mode.value}" for mode in AttentionMode}
    for step, trace in enumerate(ragged.traces):
        for rank in range(ragged.layout.world_size):
            if ragged.steps[step][ragged.layout.dp_rank(rank)].planned:
                assert {c.operator for c in trace.calls[rank]} >= modes
    rows = [[count for group in step for _, count in group.planned] for step in ragged.steps]
    assert max(rows[0]) > 1, "a prefill"
    assert set(rows[1]) == {1}, "a decode"
    assert ragged.differences == [[], []]


def test_the_replicated_wiring_gives_the_same_bits(ragged: Run, weights: ModelWeights) -> None:
    """All-reduce and every row on every rank: the same partials added in the same order, each token routed once."""
    observed = run(ragged.session.rewired(Wiring.REPLICATED), weights, RAGGED)
    assert observed.differences == [[], []]
    assert route_faults(observed) == []
    reduced = {c.site.step for step in observed.crossings for c in step if c.kind == "all_reduce"}
    assert reduced == ({"embedding", "attention output"} if ragged.layout.tp > 1 else {"attention output"})


# --- variants that must not pass -------------------------------------------------------------------------------------


def _run_example(checkpoint: Checkpoint, weights: ModelWeights) -> Run:
    return run(ModelSession.open(checkpoint, TP4_DP2), weights, EXAMPLE, new_tokens=1)


def test_replicas_dispatched_by_every_tp_rank_are_384_routes(
    checkpoint: Checkpoint, weights: ModelWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank routes its whole group's rows. The values come out right, which is why routes are counted."""
    original = expert_parallel_moe

    def replicas(
        x: Tensor, w: MoeWeights, owners: Tensor, config: ModelConfig, comm: Communicator, ops: Operators, layer: int
    ) -> ExpertParallelOutput:
        group = comm.all_gather_tokens(x, Site("replicas", layer))
        output = original(group, w, owners, config, comm, ops, layer)
        own = slice(comm.layout.tp_rank(comm.rank) * len(x), (comm.layout.tp_rank(comm.rank) + 1) * len(x))
        routes = GateOutput(*(t[own] for t in output.routes))
        return replace(output, out=output.out[own], shared=output.shared[own], routes=routes)

    monkeypatch.setattr(v41_model.rank_layer, "expert_parallel_moe", replicas)
    observed = _run_example(checkpoint, weights)
    assert routed_rows(observed, 0, 3) == 384
    assert observed.differences == [[]]
    assert route_faults(observed)[0] == "step 0, layer 0: 384 routes, 64 shared rows of 16 tokens"
    assert len(route_faults(observed)) == len(LAYERS)


def test_an_all_reduce_before_the_reduce_scatter_is_found(
    checkpoint: Checkpoint, weights: ModelWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every value comes out TP times too large."""

    class SummedTwice(ShardedBoundary):
        def reduce(self, partial: Tensor, site: Site) -> LocalRows[Tensor]:
            total = self.communicator.all_reduce(self.mapping.gathered(partial).tensor, site)
            return LocalRows(self.mapping, self.rank, self.communicator.reduce_scatter_tokens(total, site))

    monkeypatch.setattr(Wiring, "boundary", lambda _, *arguments: SummedTwice(*arguments))
    observed = _run_example(checkpoint, weights)
    assert observed.differences[0][0] == "embed_out"
    assert "layer.00.attn_out" in observed.differences[0]
    assert "all_reduce at attention output (layer 0)" in residual_crossings(observed)


def test_partials_added_in_another_order_are_found(
    checkpoint: Checkpoint, weights: ModelWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a backend's reduction may add them."""
    original = sum_in_rank_order
    monkeypatch.setattr(rank_communicator, "sum_in_rank_order", lambda partials: original(partials[::-1]))
    assert reduction_faults(_run_example(checkpoint, weights)) != []


@pytest.mark.parametrize("how", ["summed", "gathered"])
def test_a_residual_that_crosses_the_group_is_found(
    checkpoint: Checkpoint, weights: ModelWeights, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Summed, the streams are wrong; gathered and cut again they are right, and only the crossing tells."""
    original = sequence_parallel_layer

    def crossing(step: RankStep, layer: LayerConfig, w: LayerWeights, streams: ResidualStreams) -> ResidualStreams:
        out = original(step, layer, w, streams)
        rows, comm, site = out.x_hc.tensor, step.communicator, Site("residual", layer.layer_id)
        if how == "summed":
            rows = comm.all_reduce(rows.float(), site).bfloat16()
        else:
            rows = GatheredRows(step.mapping, comm.all_gather_tokens(rows, site)).slab(comm.rank).tensor
        return ResidualStreams(LocalRows(step.mapping, comm.rank, rows), out.pre_mix)

    monkeypatch.setattr(v41_model.rank_forward, "sequence_parallel_layer", crossing)
    observed = _run_example(checkpoint, weights)
    (differences,) = observed.differences
    assert residual_crossings(observed)[0].endswith("of [2, 4, 256] at residual (layer 0)")
    if how == "summed":
        assert differences[0].startswith("layer.01.")
    else:
        assert differences == []
