"""Kernels inside the running model: the installed provider, found by its name, beside the goldens call by call and,
in whole runs, token by token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from v41_config import TINY, AttentionMode, LayerConfig, ParallelLayout
from v41_goldens import ModelWeights
from v41_goldens.reference_engine import ReferenceEngine
from v41_kernels.registry import OPERATORS
from v41_loader import open_checkpoint
from v41_model import LocalWorld, ModelSession, OperatorProvider, Operators, Swap
from v41_model.cli import main
from v41_model.forward_file import forward_tensors
from v41_model.linear_calls import LINEAR_CALLS
from v41_model.logit_comparison import LOGIT_BOUNDS, LogitVerdict, compare_with_goldens
from v41_model.operator_calls import CALLS
from v41_model.operator_provider import find_provider
from v41_model.swap_report import SwapReport
from v41_model.wiring import Wiring


@pytest.fixture
def options(tiny_checkpoint: Path, tmp_path: Path) -> list[str]:
    requests = tmp_path / "requests.json"
    requests.write_text(json.dumps({"requests": [[0, 17, 42], [0, 99]]}))
    return ["--checkpoint", str(tiny_checkpoint), "--requests", str(requests), "--threads", "1"]


def test_the_kernels_are_a_provider() -> None:
    provider = find_provider("pypto")
    assert isinstance(provider, OperatorProvider)
    assert set(provider.names()) == set(OPERATORS)
    assert set(CALLS) == set(OPERATORS), "what can be exchanged inside the model: every kernel"


def test_exchanged_kernels_change_no_bit_and_no_token(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Operators whose kernels leave no choice of arithmetic, on two ranks, in every layer."""
    command = ["generate", *options, "--tp", "2", "--max-new-tokens", "1", "--no-stream"]
    assert main(command) == 0
    golden = capsys.readouterr().out.splitlines()
    assert main([*command, "--swap", "rms_norm,mhc_post,materialize_rope_rows=pypto"]) == 0
    swapped = capsys.readouterr().out.splitlines()
    assert swapped[: len(golden)] == golden
    report = swapped[len(golden) :]
    assert report[-1] == "swap: every bit is the golden's"
    calls = {line.split(": ")[1]: int(line.split(": ")[2].split()[0]) for line in report[:-1]}
    assert calls["mhc_post out"] == 2 * 2 * 10, "two sublayers of ten layers on two ranks"
    assert calls["rms_norm out"] == 2 * (2 * 10 + 1)


def test_a_defect_of_a_kernel_is_refused_locally_and_in_the_logits(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["forward", *options, "--out", str(tmp_path / "out.safetensors")]
    command += ["--swap", "combine=pypto", "--compare-logits"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "swap: every bit is the golden's" in lines
    assert "5 positions: cosine 1.000000 minimum, 1.000000 median; the best token is the golden's at 5" in lines[-1]
    provider = find_provider("pypto")

    class Defect:
        def names(self) -> list[str]:
            return list(provider.names())

        def run(self, name: str, arguments: Mapping[str, Tensor], /) -> None:
            provider.run(name, arguments)
            arguments["out"].copy_(arguments["out"].roll(1, 0))

    monkeypatch.setattr("v41_model.swap.find_provider", lambda name: Defect())
    assert main(command) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "swap: first rejection: layer 0 combine out (1 calls)" in lines
    assert "positions with a cosine below 0.98" in lines[-1]


# ---------------------------------------------------------------------------------------------- all of them, in TINY

SHORT = [[0], [421], [0, 17], [99, 99]]
LONGER = [[0, 99, 3, 4, 421], list(range(3, 16)), [7 * n % TINY.vocab_size for n in range(40)]]
PROMPTS = [*SHORT, *LONGER]
STEPS = 2
IN_EVERY_LAYER = {
    "mhc_mixes",
    "mhc_pre",
    "rms_norm",
    "q_proj_qr",
    "q_proj_rope",
    "kv_proj_rope",
    "publish_window_kv",
    "sparse_attention",
    "grouped_output",
    "o_proj",
    "mhc_post",
    "gate",
    "routed_experts",
    "shared_expert",
    "combine",
}
ENTRY_AND_EXIT = {"embed", "input_pack", "materialize_rope_rows", "hc_head", "rms_norm", "greedy"}
LM_HEAD = {"lm_head", "fp32_linear"}
"""One contract; whichever of them the report names."""


def operators_of(layer: LayerConfig) -> set[str]:
    """What a layer calls, by its role."""
    names = set(IN_EVERY_LAYER)
    if layer.owns_kv:
        names |= {f"compress_ratio_{layer.compress_ratio}", "index_keys", "publish_index_key", "publish_compressed_kv"}
    if layer.owns_index:
        names |= {"index_queries", f"hierarchical_sparse_indexer_{layer.mode.value}"}
    return names


def operators_seen(report: SwapReport, layer: int | None) -> set[str]:
    return {operator for seen, operator, _ in report.seen if seen == layer}


@dataclass(frozen=True)
class SwappedRun:
    """A prefill of all prompts in one step and two greedy decode steps, and the goldens on the same tokens."""

    report: SwapReport
    tensors: dict[str, Tensor]
    logits: LogitVerdict

    def tokens(self, request: int) -> list[int]:
        """The tokens that were fed back."""
        tokens: list[int] = self.tensors[f"request.{request}.decode_tokens"].tolist()
        return tokens


def swapped_run(
    checkpoint: Path, operators: str, prompts: list[list[int]], steps: int, wiring: Wiring = Wiring.SHARDED
) -> SwappedRun:
    world = LocalWorld(ParallelLayout())
    swap = Swap.of_installed(dict.fromkeys(operators.split(","), "pypto"), TINY, world)
    try:
        with open_checkpoint(checkpoint) as opened:
            session = ModelSession.open(opened, world.layout, world, swap.operators, wiring=wiring)
        tensors = forward_tensors(session, prompts, steps)
    finally:
        swap.close()
    session.operators = Operators()
    return SwappedRun(swap.report, tensors, compare_with_goldens(session, tensors, len(prompts)))


@pytest.fixture(scope="module")
def every_kernel(tiny_checkpoint: Path) -> SwappedRun:
    return swapped_run(tiny_checkpoint, "all", PROMPTS, STEPS)


@pytest.mark.kernels
def test_every_kernel_in_every_layer_is_accepted(every_kernel: SwappedRun) -> None:
    """Call by call, from the swapped run's own inputs."""
    report = every_kernel.report
    for layer in TINY.layers:
        assert operators_seen(report, layer.layer_id) == operators_of(layer)
    entry_and_exit = operators_seen(report, None)
    assert entry_and_exit - LM_HEAD == ENTRY_AND_EXIT
    assert entry_and_exit & LM_HEAD
    steps = {calls.calls for calls in report.seen.values() if calls.operator in ("gate", "o_proj")}
    assert steps == {1 + STEPS}
    assert report.accepted, report.lines()


@pytest.mark.kernels
def test_short_prompts_give_the_goldens_tokens(every_kernel: SwappedRun, tiny_weights: ModelWeights) -> None:
    """Tokens that follow one or two others."""
    for request, prompt in enumerate(SHORT):
        golden = ReferenceEngine(TINY, tiny_weights).generate(0, prompt, STEPS)
        known = 3 - len(prompt)
        assert every_kernel.tokens(request)[:known] == golden[:known]


@pytest.mark.kernels
def test_longer_prompts_keep_the_goldens_logits(every_kernel: SwappedRun) -> None:
    """Every position of all prompts and both decode steps, and the longest prompt by itself."""
    verdict = every_kernel.logits
    assert len(verdict.cosines) == sum(map(len, PROMPTS)) + STEPS * len(PROMPTS)
    verdict.require("logits of TINY with all kernels")
    longest = verdict.cosines[-len(PROMPTS[-1]) - STEPS :]
    assert longest.median() >= LOGIT_BOUNDS.median
    assert longest.min() < 1 - 1e-7, "the kernels' sums are in another order: equal logits would be the goldens' own"


@pytest.mark.kernels
def test_whole_attention_modes_as_kernels(tiny_checkpoint: Path) -> None:
    """All six, as prefill and as decode."""
    modes = [name for name in CALLS if "_attn_" in name]
    run = swapped_run(tiny_checkpoint, ",".join(modes), [[0, 17], list(range(3, 16))], 1)
    for layer in TINY.layers:
        expected = {f"{phase}_attn_{layer.mode.value}" for phase in ("prefill", "decode")}
        assert operators_seen(run.report, layer.layer_id) == expected
    assert {layer.mode for layer in TINY.layers} == set(AttentionMode)
    assert run.report.accepted, run.report.lines()
    run.logits.require("logits of TINY with attention kernels")


@pytest.mark.kernels
@pytest.mark.parametrize("wiring", Wiring)
def test_half_layers_and_moe_as_kernels(tiny_checkpoint: Path, wiring: Wiring) -> None:
    """All of a layer in two kernels, as prefill and as decode; experts are the same in both wirings."""
    ending = "_sharded" if wiring is Wiring.SHARDED else ""
    halves = {
        (phase, mode): f"{phase}_{mode.value}{ending}" for phase in ("prefill", "decode") for mode in AttentionMode
    }
    experts, choice = ({"moe"}, {"greedy"}) if wiring is Wiring.SHARDED else (set[str](), set[str]())
    run = swapped_run(tiny_checkpoint, ",".join([*halves.values(), *experts, *choice]), [[0, 17]], 1, wiring)
    for layer in TINY.layers:
        own = {name for (_, mode), name in halves.items() if mode is layer.mode}
        assert operators_seen(run.report, layer.layer_id) == own | experts
    assert operators_seen(run.report, None) == choice
    assert run.report.accepted, run.report.lines()
    run.logits.require("logits of TINY with half layers as kernels")


@pytest.mark.kernels
def test_projections_as_one_kernel(tiny_checkpoint: Path) -> None:
    report = swapped_run(tiny_checkpoint, "qkv_proj_rope", [[0, 17]], 0).report
    assert set(report.seen) == {
        (layer.layer_id, "qkv_proj_rope", out) for layer in TINY.layers for out in ("qr", "q", "kv")
    }
    assert report.accepted, report.lines()


@pytest.mark.kernels
def test_linears_inside_the_goldens_as_kernels(tiny_checkpoint: Path) -> None:
    """Every linear of a token, in the stages that have one of its kind."""
    run = swapped_run(tiny_checkpoint, ",".join(LINEAR_CALLS), [[0]], 0)
    for layer in TINY.layers:
        indexed = {"bf16_linear"} if layer.owns_kv or layer.owns_index else set[str]()
        assert operators_seen(run.report, layer.layer_id) == set(LINEAR_CALLS) - {"bf16_linear"} | indexed
    assert operators_seen(run.report, None) == {"fp32_linear"}, "the LM head"
    assert run.report.accepted, run.report.lines()
    run.logits.require("logits of TINY with linears as kernels")


@pytest.mark.kernels
def test_every_kernel_at_once_on_two_ranks(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What differs stays within the judges' bounds where a rank holds half of the heads and experts, too."""
    command = ["generate", *options, "--tp", "2", "--max-new-tokens", "1", "--swap", "all=pypto"]
    assert main(command) == 0
    report = [line for line in capsys.readouterr().out.splitlines() if line.startswith("swap: ")]
    assert len(report) > 30
    assert all(line.endswith(" 0 calls rejected") for line in report if "calls, " in line)
