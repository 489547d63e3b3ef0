"""`validate` and `v41-golden run`: seed cases pass, and whatever a golden does wrong is named."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from v41_config import FLASH, AttentionMode, ParallelLayout, operators
from v41_goldens import output_projection, rank_simulator
from v41_goldens.cli import main
from v41_goldens.compositions import COMPOSITIONS
from v41_goldens.errors import OperandError
from v41_goldens.fixtures import FixtureCase
from v41_goldens.golden_run import GoldenRun, validate, wirings
from v41_goldens.operators import attention_entries, attention_stages, golden, row_stages
from v41_goldens.operators.call import Call

Spoil = Callable[[str, Callable[[Call], object]], None]

SMALL = FixtureCase(tokens=6, active_tokens=5, requests=2)


def passes(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main(["run", *arguments])
    out = capsys.readouterr().out
    assert code == 0, out
    case, verdict = out.splitlines()
    assert verdict.startswith("[GOLDEN] PASS ")
    assert verdict.removeprefix("[GOLDEN] PASS ").split(":")[0] == case.split(":")[0]
    return out


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("mode", AttentionMode, ids=lambda mode: mode.value)
def test_every_half_layer_passes_at_tp4(capsys: pytest.CaptureFixture[str], mode: AttentionMode, phase: str) -> None:
    """32 tokens, 24 active, in both wirings."""
    assert f"{phase}_{mode.value}:" in passes(capsys, mode.value, "--phase", phase, "--tp", "4", "--epochs", "1")


def test_the_other_cases_that_run_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert passes(capsys, "decode_c2a_reuse").startswith(
        "decode_c2a_reuse: decode, tiny, 33 tokens, 31 active, 6 requests, tp=1, dp=1, seed 0, "
        "replicated and sharded, 2 epochs\n"
    )
    uneven = passes(capsys, "prefill_c2a_full", "--tp", "4", "--dp", "2", "--requests", "3", "--dp-tokens", "7,1")
    assert "prefill, tiny, 7 tokens, 7+1 active, 3 requests, tp=4, dp=2, seed 0" in uneven
    assert "replicated and sharded, 3 epochs" in uneven
    passes(capsys, "moe", "--tp", "2", "--dp-tokens", "8,5", "--epochs", "1")


@pytest.mark.parametrize("name", [*COMPOSITIONS, "rms_norm", "hierarchical_sparse_indexer_c1a_full", "dispatch"])
def test_one_process(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert f"PASS {name}: " in passes(capsys, name, "--tokens", "9", "--requests", "3")


@pytest.mark.parametrize(
    "arguments",
    [
        ["rms_norm", "--tokens", "0"],
        ["decode_c2a_full", "--tokens", "0"],
        ["forward", "--tokens", "1", "--requests", "1"],
        ["decode_c1a_full", "--tp", "4", "--tokens", "3", "--epochs", "1"],
        ["prefill_c1a_reindex", "--tp", "2", "--dp-tokens", "0,5", "--requests", "2", "--epochs", "1"],
        ["moe", "--tp", "2", "--dp-tokens", "0,5", "--requests", "2", "--epochs", "1"],
    ],
    ids=" ".join,
)
def test_few_tokens(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """None at all, fewer than ranks, an idle DP group."""
    passes(capsys, *arguments)


def test_the_forty_layers_of_the_release() -> None:
    """The release's own schedule of modes, in widths of a toy."""
    config = FLASH.scaled(num_hidden_layers=40)
    assert [layer.mode for layer in config.layers] == [layer.mode for layer in FLASH.layers]
    result = COMPOSITIONS["forward"].validate(FixtureCase(config=config, tokens=4, requests=1))
    assert result.passed, result.error


def test_list_names_every_golden(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [*operators(), *COMPOSITIONS]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "operator: expected"),
        (["decode_swa", "--phase", "prefill"], "--phase: expected decode, the phase of decode_swa, found 'prefill'"),
        (["rms_norm", "--wiring", "sharded"], "rms_norm --wiring: expected one of replicated, or both"),
        (["rms_norm", "--epochs", "0"], "epochs: expected at least 1, found 0"),
        (["rms_norm", "--tokens", "4", "--active-tokens", "5"], "active tokens: expected 0 to tokens = 4, found 5"),
        (["rms_norm", "--requests", "0"], "requests: expected 1 to 1048576, found 0"),
        (["rms_norm", "--dp-tokens", "7,x"], "--dp-tokens: expected numbers"),
        (["rms_norm", "--dp", "3", "--dp-tokens", "7,1"], "dp_tokens: expected a count for each of 3 DP groups"),
        (["rms_norm", "--dp-tokens", "\u0663,1"], "--dp-tokens: expected numbers"),
        (
            ["rms_norm", "--dp-tokens", "7,1", "--active-tokens", "3"],
            "active tokens: expected nothing beside dp_tokens",
        ),
        (["rms_norm", "--seed", "-1"], "seed: expected 0 to 18446744073709551615, found -1"),
        (["rms_norm", "--seed", "1" * 40], "seed: expected 0 to"),
        (["q_proj_rope", "--tp", "3"], "expected"),
        (["forward", "--save-data", "x"], "--save-data: expected an operator: a composition has none, found 'forward'"),
        (["forward", "--tp", "4"], "--tp, --dp: expected one rank"),
        (["rms_norm", "--golden-data", "nowhere"], "manifest.json: expected"),
        (
            ["rms_norm", "--golden-data", "nowhere", "--tokens", "8"],
            "--tokens: expected nothing beside --golden-data, whose tree has its own, found 8",
        ),
        (["rms_norm", "--golden-data", "nowhere", "--tp", "4"], "--tp: expected nothing beside --golden-data"),
    ],
)
def test_bad_arguments_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["run", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("v41-golden: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_wirings_of_a_name() -> None:
    assert wirings("decode_swa") == {"replicated": "decode_swa", "sharded": "decode_swa_sharded"}
    assert wirings("decode_swa", "sharded") == {"sharded": "decode_swa_sharded"}
    assert wirings("decode_swa_sharded") == {"sharded": "decode_swa_sharded"}
    with pytest.raises(OperandError):
        wirings("decode_swa_sharded", "replicated")


def fails(run: GoldenRun, tensor: str, why: str) -> None:
    assert not run.passed
    assert run.error is not None
    assert run.error.startswith(tensor), run.error
    assert why in run.error, run.error


def test_nothing_judged_is_nothing_passed() -> None:
    assert not GoldenRun(()).passed
    assert GoldenRun(()).error == "nothing was judged"


def test_a_result_that_is_no_number(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def spoiled(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.ones_like(x)
        out[3, 7] = torch.nan
        return out

    monkeypatch.setattr(row_stages, "rms_norm", spoiled)
    fails(
        validate("rms_norm", SMALL),
        "replicated rank 0 out: ",
        "1 elements are not finite; 1 of 5 rows are beyond a bound",
    )
    assert main(["run", "rms_norm", "--tokens", "6"]) == 1
    assert "[GOLDEN] FAIL rms_norm: replicated rank 0 out: " in capsys.readouterr().out


def test_epochs_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()
    monkeypatch.setattr(row_stages, "mhc_pre", lambda x, _: torch.full_like(x[:, 0], next(calls) // 2))
    assert validate("mhc_pre", SMALL, epochs=2).passed
    fails(validate("mhc_pre", SMALL, epochs=3), "replicated epoch 3 rank 0 out: ", "elements differ")


@pytest.fixture
def spoil() -> Iterator[Spoil]:
    """`spoil(name, change)`: the golden of that name does something to its call first, until the test ends."""
    kept = {}

    def apply(name: str, change: Callable[[Call], object]) -> None:
        found = golden(name)
        kept[name] = right = found._results

        def results(calls: Sequence[Call]) -> object:
            for call in calls:
                change(call)
            return right(calls)

        object.__setattr__(found, "_results", results)

    yield apply
    for name, results in kept.items():
        object.__setattr__(golden(name), "_results", results)


def test_an_operand_that_is_written(spoil: Spoil) -> None:
    spoil("mhc_pre", lambda call: call["x_hc"][1, 2].zero_())
    fails(validate("mhc_pre", SMALL), "replicated rank 0 x_hc: ", "first at [1, 2, 0]")


def test_storage_that_no_slot_names(spoil: Spoil) -> None:
    spoil("publish_window_kv", lambda call: call["window_kv"].view(torch.uint8)[-1].fill_(3))
    fails(validate("publish_window_kv", SMALL), "replicated rank 0 storage: ", "window_kv: ")
    spoil("compress_ratio_2", lambda call: call["state_cache"].fill_(3))
    fails(validate("compress_ratio_2", SMALL), "replicated rank 0 storage: ", "state_cache: ")


def test_partials_that_are_rounded_before_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(partials: list[Tensor], rows: int) -> list[Tensor]:
        return rank_simulator.reduce_scatter_tokens([p.bfloat16().float() for p in partials], rows)

    monkeypatch.setattr(attention_entries, "reduce_scatter_tokens", rounded)
    case = FixtureCase(layout=ParallelLayout(4), tokens=12, requests=2)
    fails(validate("prefill_swa", case), "sharded rank ", "elements differ")


def test_slabs_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_entries, "all_gather_tokens", lambda slabs: torch.cat(slabs[::-1]))
    case = FixtureCase(layout=ParallelLayout(2), tokens=8, requests=2)
    fails(validate("prefill_swa", case), "sharded rank 0 attn_output", "elements differ")


def test_a_sum_that_forgets_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_entries, "all_reduce", lambda partials: partials[0])
    monkeypatch.setattr(
        attention_entries,
        "reduce_scatter_tokens",
        lambda p, rows: rank_simulator.reduce_scatter_tokens(p[:1] * 1, rows),
    )
    case = FixtureCase(layout=ParallelLayout(2), tokens=8, requests=2)
    fails(
        validate("prefill_swa", case, wiring="replicated"),
        "replicated rank 0 attn_output of one rank",
        "beyond a bound",
    )


def test_a_saved_tree_is_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on other defaults: operands come from the tree."""
    passes(capsys, "decode_c1a_reindex", "--tp", "2", "--tokens", "6", "--save-data", str(tmp_path / "out"))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["replicated", "sharded"]
    replayed = passes(capsys, "decode_c1a_reindex", "--golden-data", str(tmp_path / "out"))
    assert f"decode_c1a_reindex: decode, tiny, operands saved in {tmp_path / 'out'}, replicated and sharded" in replayed
    assert "; rank 0 T=6, " in replayed
    assert ", num_tokens=6, tp=2, dp=1\n" in replayed
    manifest = json.loads((tmp_path / "out" / "sharded" / "manifest.json").read_text())
    assert manifest["operator"] == "decode_c1a_reindex_sharded"
    assert (manifest["tp"], manifest["wiring"], manifest["preset"]) == (2, "sharded", "tiny")

    passes(capsys, "o_proj", "--save-data", str(tmp_path / "o_proj"))
    monkeypatch.setattr(attention_stages, "o_proj", lambda u, w, c: output_projection.o_proj(u, w, c) * 1.0001)
    assert main(["run", "o_proj", "--golden-data", str(tmp_path / "o_proj")]) == 1
    assert "FAIL o_proj: replicated saved rank 0 output_partial: expected the same dtype" in capsys.readouterr().out


def test_one_tree_that_is_there_stops_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sharded").mkdir()
    assert main(["run", "decode_swa", "--tokens", "4", "--requests", "2", "--save-data", str(tmp_path)]) == 2
    assert "sharded: expected a new directory, found something there" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["sharded"]
