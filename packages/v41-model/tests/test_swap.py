"""Exchanged operators: the same bits where the provider is the golden, the place of the first difference where not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from v41_config import TINY, AttentionMode, ParallelLayout, find_operator, operators
from v41_goldens.errors import OperandError
from v41_goldens.operators import golden
from v41_loader import Checkpoint
from v41_model import operator_provider
from v41_model.errors import ProviderError, RankError
from v41_model.generation import Request, admit, advance
from v41_model.linear_calls import LINEAR_CALLS
from v41_model.local_world import LocalWorld
from v41_model.operator_calls import CALLS
from v41_model.operator_provider import OperatorProvider, find_provider
from v41_model.operators import Operators
from v41_model.session import ModelSession
from v41_model.swap import Swap, parse_swaps
from v41_model.swap_report import SwapReport
from v41_model.wiring import Wiring

LAYOUT = ParallelLayout(2, 1)
PROMPT = tuple(range(3, 40))


class Goldens:
    """The goldens' own destination form as a provider; ``spoil`` changes what it wrote."""

    def __init__(
        self, spoil: Callable[[str, Mapping[str, Any]], None] | None = None, layout: ParallelLayout = LAYOUT
    ) -> None:
        self.calls: list[str] = []
        self._spoil, self._layout = spoil, layout

    def names(self) -> Collection[str]:
        return set(CALLS)

    def run(self, name: str, arguments: Mapping[str, object], /) -> None:
        spec = find_operator(name)
        sizes = spec.check(arguments)
        extents = {symbol: sizes[symbol] for symbol in spec.given if symbol in sizes}
        if "kept_blocks" in arguments and "ENTRIES" not in extents:
            extents["ENTRIES"] = sizes["CANDIDATE_BLOCKS"] * TINY.candidate_block_size
        if "T_local" in sizes:
            extents.setdefault("T", sizes["T_local"] * self._layout.tp)
        bound = spec.bind(TINY, self._layout, **extents)
        golden(name).run(bound, arguments)
        self.calls.append(name)
        if self._spoil is not None:
            self._spoil(name, arguments)


def _generated(checkpoint: Checkpoint, providers: Mapping[str, OperatorProvider]) -> tuple[list[Tensor], SwapReport]:
    """The logits of a prefill in two chunks and of two decode steps."""
    world = LocalWorld(LAYOUT)
    swap = Swap(providers, TINY, world)
    session = ModelSession.open(checkpoint, LAYOUT, world, swap.operators)
    groups = admit(session, [Request(PROMPT, 3), Request((5,), 3)])
    return [step.output.logits for _ in range(4) for step in advance(session, groups, 20)], swap.report


@pytest.fixture(scope="module")
def plain(tiny_checkpoint: Checkpoint) -> list[Tensor]:
    return _generated(tiny_checkpoint, {})[0]


SINGLE = {name for name, calls in CALLS.items() if not calls.composed}
MODES = {name for name in CALLS if "_attn_" in name}
BEHIND_OTHERS = {*LINEAR_CALLS, "candidate_blocks"}
"""Not called where the stages that they are part of are exchanged too."""


@pytest.mark.parametrize("whole_modes", [False, True], ids=["single", "modes"])
def test_every_operator_through_its_contract_gives_the_goldens_bits(
    tiny_checkpoint: Checkpoint, plain: list[Tensor], whole_modes: bool
) -> None:
    """All operands, destinations and scalars of every operator go through the ABI and back, in all six modes and in
    prefill and decode."""
    provider = Goldens()
    chosen = MODES if whole_modes else SINGLE - BEHIND_OTHERS
    logits, report = _generated(tiny_checkpoint, dict.fromkeys(chosen, provider))
    assert set(provider.calls) == chosen
    assert report.first_difference is None, report.lines()
    assert report.accepted
    assert all(torch.equal(ours, expected) for ours, expected in zip(logits, plain, strict=True))
    assert report.lines()[-1] == "every bit is the golden's"


DESTINATIONS = [
    # a mode's decode entry is written like its prefill entry
    pytest.param(name, tensor, marks=[pytest.mark.slow] if name.startswith("decode_") else [])
    for name in sorted(SINGLE | MODES)
    for tensor in find_operator(name).destinations
]


class Enough(Exception):
    pass


@pytest.mark.parametrize(("operator", "tensor"), DESTINATIONS)
def test_one_wrong_element_of_any_tensor_is_found_and_named(
    tiny_checkpoint: Checkpoint, operator: str, tensor: str
) -> None:
    """The first call that writes something alters one byte of it: the report names operator and tensor."""
    count = 0

    def spoil(name: str, arguments: Mapping[str, Any]) -> None:
        nonlocal count
        count += bool(arguments[tensor].numel())
        if count == 1:
            arguments[tensor].view(torch.uint8).view(-1)[0] ^= 1
        if count == 2:
            raise Enough

    world = LocalWorld(ParallelLayout(1, 1))
    swap = Swap({operator: Goldens(spoil, world.layout)}, TINY, world)
    session = ModelSession.open(tiny_checkpoint, world.layout, world, swap.operators)
    groups = admit(session, [Request(PROMPT[:6], 4)])
    try:
        for _ in range(4):
            advance(session, groups)
    except Enough:  # outside of the ranks
        pass
    except RankError as error:  # a wrong selection may name what is not there
        if not isinstance(error.__cause__, (Enough, OperandError)):
            raise
    assert count
    first = swap.report.first_difference
    assert first is not None
    assert (first.operator, first.tensor, first.unequal) == (operator, tensor, 1)
    assert "first difference: " + first.place in "\n".join(swap.report.lines())


def test_the_layer_is_named(tiny_checkpoint: Checkpoint, plain: list[Tensor]) -> None:
    """A norm that is wrong in one layer of one rank stands there, though everything behind it changes too."""
    calls = 0

    def spoil(name: str, arguments: Mapping[str, Any]) -> None:
        nonlocal calls
        calls += 1
        if calls == 2 * 2 * 3 + 1:  # two norms a layer on each of two ranks; in layer 3 rank 0 comes first
            arguments["out"][1, :8] += 3

    logits, report = _generated(tiny_checkpoint, {"rms_norm": Goldens(spoil)})
    assert not torch.equal(logits[0], plain[0])
    first = report.first_difference
    assert first is not None
    assert first.layer == 3
    assert "rank 0" in first.first
    assert "REJECTED" in first.first
    assert not report.accepted
    assert "first rejection: layer 3 rms_norm out" in report.lines()[-1]


def test_a_small_error_of_floats_is_told_and_accepted(tiny_checkpoint: Checkpoint) -> None:
    def spoil(name: str, arguments: Mapping[str, Any]) -> None:
        arguments["out"].view(torch.int16)[0, 0] ^= 1

    _, report = _generated(tiny_checkpoint, {"mhc_pre": Goldens(spoil)})
    assert report.first_difference is not None
    assert "within bounds" in report.first_difference.first
    assert report.accepted


def test_a_destination_left_alone_is_rejected(tiny_checkpoint: Checkpoint) -> None:
    class Idle(Goldens):
        def run(self, name: str, arguments: Mapping[str, object], /) -> None: ...

    for operator in ("mhc_post", "combine"):
        with pytest.raises(RankError, match="NaN"):
            _generated(tiny_checkpoint, {operator: Idle()})


HALVES = {name for name, calls in CALLS.items() if calls.joins == "TP"}
SHARDED = {name for name in HALVES if name.endswith("_sharded")}
AROUND = {
    Wiring.SHARDED: {*SHARDED, "moe", "greedy"},
    Wiring.REPLICATED: {*HALVES - SHARDED, "moe", "greedy"},
}
"""What is exchanged at once, by wiring: each of these is called in one of two steps."""
INSIDE = {"qkv_proj_rope", *LINEAR_CALLS}


def _run_alone(
    checkpoint: Checkpoint,
    chosen: Collection[str],
    provider: OperatorProvider,
    wiring: Wiring = Wiring.SHARDED,
    steps: int = 2,
) -> tuple[list[Tensor], SwapReport]:
    """The logits of a prefill and of decode steps on one rank."""
    world = LocalWorld(1)
    swap = Swap(dict.fromkeys(sorted(chosen), provider), TINY, world)
    session = ModelSession.open(checkpoint, world.layout, world, swap.operators, wiring=wiring)
    groups = admit(session, [Request(PROMPT[:3], steps)])
    return [step.output.logits for _ in range(steps) for step in advance(session, groups)], swap.report


@pytest.fixture(scope="module")
def plain_alone(tiny_checkpoint: Checkpoint) -> list[Tensor]:
    return _run_alone(tiny_checkpoint, (), Goldens())[0]


def _seen(report: SwapReport, layer: int | None) -> set[str]:
    return {operator for seen, operator, _ in report.seen if seen == layer}


@pytest.mark.parametrize("wiring", Wiring)
def test_half_layers_moe_and_greedy_through_their_contracts_give_the_goldens_bits(
    tiny_checkpoint: Checkpoint, plain_alone: list[Tensor], wiring: Wiring
) -> None:
    provider = Goldens(layout=ParallelLayout())
    logits, report = _run_alone(tiny_checkpoint, AROUND[wiring], provider, wiring)
    assert set(provider.calls) == AROUND[wiring]
    ending = "_sharded" if wiring is Wiring.SHARDED else ""
    for layer in TINY.layers:
        halves = {f"{phase}_{layer.mode.value}{ending}" for phase in ("prefill", "decode")}
        assert _seen(report, layer.layer_id) == {*halves, "moe"}
    assert _seen(report, None) == {"greedy"}
    assert report.first_difference is None, report.lines()
    assert report.accepted
    assert all(torch.equal(ours, expected) for ours, expected in zip(logits, plain_alone, strict=True))


def test_linears_inside_the_stages_give_the_goldens_bits(
    tiny_checkpoint: Checkpoint, plain_alone: list[Tensor]
) -> None:
    """Each in the layers that have one of its kind, beside the three projections as one."""
    provider = Goldens(layout=ParallelLayout())
    logits, report = _run_alone(tiny_checkpoint, INSIDE, provider)
    assert set(provider.calls) == INSIDE
    for layer in TINY.layers:
        expected = {"qkv_proj_rope", "quantized_linear", "quantized_linear_fp32", "quantized_linear_fp4", "fp32_linear"}
        if layer.owns_index or layer.owns_kv:
            expected.add("bf16_linear")
        assert _seen(report, layer.layer_id) == expected
    assert _seen(report, None) == {"fp32_linear"}, "the LM head"
    assert report.first_difference is None, report.lines()
    assert all(torch.equal(ours, expected) for ours, expected in zip(logits, plain_alone, strict=True))


def test_linears_on_two_ranks(tiny_checkpoint: Checkpoint) -> None:
    """Each of its own shard, and once for all rows of the group."""
    world = LocalWorld(LAYOUT)
    swap = Swap(dict.fromkeys(INSIDE, Goldens()), TINY, world)
    session = ModelSession.open(tiny_checkpoint, LAYOUT, world, swap.operators)
    advance(session, admit(session, [Request(PROMPT[:3], 1)]))
    assert swap.report.operators == INSIDE
    assert swap.report.first_difference is None, swap.report.lines()
    outputs = {layer: calls for (layer, name, _), calls in swap.report.seen.items() if name == "quantized_linear_fp32"}
    assert {(calls.calls, calls.elements) for calls in outputs.values()} == {(2, 2 * 3 * TINY.hidden_size)}


def _one_wrong_element(tensor: Tensor) -> None:
    """Beyond every bound: a byte of another value, or a float that is far off."""
    if tensor.is_floating_point() and tensor.element_size() > 1:
        tensor.view(-1)[0] += 1e4
    else:
        tensor.view(torch.uint8).view(-1)[0] ^= 1


@pytest.mark.parametrize(
    ("chosen", "wiring"),
    [
        pytest.param(AROUND[Wiring.SHARDED], Wiring.SHARDED, id="half layers, sharded"),
        pytest.param(AROUND[Wiring.REPLICATED], Wiring.REPLICATED, id="half layers, replicated"),
        pytest.param(INSIDE, Wiring.SHARDED, id="linears"),
    ],
)
def test_a_defect_of_each_tensor_of_larger_pieces_and_linears_is_rejected(
    tiny_checkpoint: Checkpoint, chosen: set[str], wiring: Wiring
) -> None:
    """One element of everything that every call writes: each tensor is rejected in each layer and step."""

    def spoil(name: str, arguments: Mapping[str, Any]) -> None:
        for tensor in find_operator(name).destinations:
            if arguments[tensor].numel():
                _one_wrong_element(arguments[tensor])

    _, report = _run_alone(tiny_checkpoint, chosen, Goldens(spoil, ParallelLayout()), wiring)
    assert {(operator, tensor) for _, operator, tensor in report.seen} == {
        (name, tensor) for name in chosen for tensor in find_operator(name).destinations
    }
    for calls in report.seen.values():
        assert (calls.unequal, calls.rejected) == (calls.calls, calls.calls), calls
    assert not report.accepted


@pytest.mark.parametrize(
    ("chosen", "called"),
    [
        ({"moe", "gate", "quantized_linear_fp4", "combine"}, {"moe"}),
        ({"prefill_swa_sharded", "prefill_attn_swa", "prefill_attn_c2a_reuse", "mhc_post"},
         {"prefill_swa_sharded", "prefill_attn_c2a_reuse", "mhc_post"}),
        ({"qkv_proj_rope", "q_proj_qr", "kv_proj_rope"}, {"qkv_proj_rope"}),
        ({"gate", "lm_head", "fp32_linear"}, {"gate", "lm_head", "fp32_linear"}),
    ],
)  # fmt: skip
def test_the_larger_of_two_runs(tiny_checkpoint: Checkpoint, chosen: set[str], called: set[str]) -> None:
    """What a piece is made of is not called inside of it, and still is elsewhere."""
    provider = Goldens(layout=ParallelLayout())
    _, report = _run_alone(tiny_checkpoint, chosen, provider, steps=1)
    assert report.operators == set(provider.calls) == called
    if "prefill_swa_sharded" in chosen:
        swa = {layer.layer_id for layer in TINY.layers if layer.mode is AttentionMode.SWA}
        halves = {key[0]: calls for key, calls in report.seen.items() if key[1:] == ("mhc_post", "out")}
        assert {layer: calls.calls for layer, calls in halves.items()} == {
            layer.layer_id: 1 if layer.layer_id in swa else 2 for layer in TINY.layers
        }
    if "fp32_linear" in chosen:
        assert {layer for layer, operator, _ in report.seen if operator == "fp32_linear"} == {
            layer.layer_id for layer in TINY.layers if layer.mode is AttentionMode.C2A_FULL
        }
    assert report.first_difference is None


def test_every_operator_but_the_transports_can_be_exchanged() -> None:
    transports = {"dispatch", "return_to_source", "tp_logits_all_gather"} | {
        name for name in operators() if "_tp_" in name
    }
    assert set(CALLS) == set(operators()) - transports


@pytest.mark.parametrize(
    ("name", "layout", "pattern"),
    [
        ("moe", ParallelLayout(2, 1), "swap moe: expected one rank in the EP group, .* found 2 ranks"),
        ("moe", ParallelLayout(1, 4), "swap moe: .* EP group, .* found 4 ranks"),
        ("decode_swa", ParallelLayout(2, 1), "swap decode_swa: .* TP group, .* found 2 ranks"),
        ("prefill_c1a_full_sharded", ParallelLayout(8, 2), "TP group, .* found 8 ranks"),
    ],
)
def test_pieces_that_join_ranks_are_refused_where_there_are_several(
    name: str, layout: ParallelLayout, pattern: str
) -> None:
    """Before anything is loaded, and by whoever makes the table himself."""
    with pytest.raises(ProviderError, match=pattern):
        parse_swaps([f"{name}=mine"], layout)
    with pytest.raises(ProviderError, match=pattern):
        Swap({name: Goldens()}, TINY, LocalWorld(layout))


def test_half_layers_beside_another_dp_group(tiny_checkpoint: Checkpoint) -> None:
    """Each group is one rank of attention; experts are the model's own."""
    world = LocalWorld(ParallelLayout(1, 2))
    provider = Goldens(layout=ParallelLayout())
    swap = Swap(dict.fromkeys(SHARDED, provider), TINY, world)
    session = ModelSession.open(tiny_checkpoint, world.layout, world, swap.operators)
    advance(session, admit(session, [Request((5, 6), 1)]))
    assert swap.report.first_difference is None
    assert swap.report.operators == {name for name in SHARDED if name.startswith("prefill")}


def test_a_report_of_nothing_is_no_acceptance() -> None:
    report = SwapReport()
    assert not report.accepted
    assert report.lines() == ["no exchanged operator was called"]


class TestChoice:
    def test_texts(self) -> None:
        assert parse_swaps(["rms_norm,mhc_post=pypto", "o_proj=mine"]) == {
            "rms_norm": "pypto",
            "mhc_post": "pypto",
            "o_proj": "mine",
        }
        assert parse_swaps(["all=pypto"]) == {"all": "pypto"}

    @pytest.mark.parametrize(
        ("texts", "pattern"),
        [
            (["rms_norm"], r"OPERATOR\[,OPERATOR...\]=PROVIDER"),
            (["=pypto"], "PROVIDER"),
            (["rms_norm="], "PROVIDER"),
            (["rmsnorm=pypto"], r"did you mean rms_norm\?"),
            (["rms_norm=a", "rms_norm=b"], "rms_norm twice"),
            (["dispatch=pypto"], "an operator that moves no rows between ranks"),
            (["rms_norm,=a"], "an operator that can be exchanged"),
        ],
    )
    def test_texts_of_another_form(self, texts: list[str], pattern: str) -> None:
        with pytest.raises(ProviderError, match=pattern):
            parse_swaps(texts)

    def test_an_operator_that_the_provider_has_not(self) -> None:
        class Few(Goldens):
            def names(self) -> Collection[str]:
                return ["rms_norm"]

        with pytest.raises(ProviderError, match=r"swap o_proj: expected one of rms_norm"):
            Swap({"o_proj": Few()}, TINY, LocalWorld(1))

    def test_all_means_what_both_have(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Some(Goldens):
            def names(self) -> Collection[str]:
                return ["rms_norm", "o_proj", "nobody_calls_this"]

        monkeypatch.setattr("v41_model.swap.find_provider", lambda name: Some())
        swap = Swap.of_installed({"all": "mine"}, TINY, LocalWorld(1))
        exchanged = swap.operators.at(0)
        changed = {name for name in Operators.names() if getattr(exchanged, name) is not getattr(Operators(), name)}
        assert changed == {"rms_norm", "o_proj"}
        assert swap.operators.at(0) is swap.operators.at(1).at(0), "whichever table is asked"


class TestProviders:
    @pytest.fixture
    def install(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
        def install(name: str, value: str) -> None:
            point = EntryPoint(name, value, operator_provider.PROVIDER_GROUP)
            monkeypatch.setattr(operator_provider, "entry_points", lambda group: [point])

        return install

    def test_a_class_is_made_and_an_object_taken(
        self, install: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = ModuleType("a_distribution")
        vars(module).update(Kind=Goldens, ready=Goldens())
        monkeypatch.setitem(sys.modules, "a_distribution", module)
        install("mine", "a_distribution:Kind")
        assert isinstance(find_provider("mine"), Goldens)
        install("mine", "a_distribution:ready")
        assert find_provider("mine") is vars(module)["ready"]

    def test_one_that_is_not_installed(self, install: Callable[[str, str], None]) -> None:
        install("mine", "nowhere:at_all")
        with pytest.raises(ProviderError, match=r"provider: expected an installed provider of operators: mine"):
            find_provider("other")

    @pytest.mark.parametrize(
        ("value", "pattern"),
        [("nowhere:at_all", "ModuleNotFoundError"), ("json:loads", "TypeError"), ("builtins:dict", "names")],
    )
    def test_what_is_no_provider(self, install: Callable[[str, str], None], value: str, pattern: str) -> None:
        install("mine", value)
        with pytest.raises(ProviderError, match=pattern):
            find_provider("mine")
