"""`v41-config`: what the commands print, and one line for bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from v41_config import FLASH, TINY, CapacityAssumptions, CapacityPlan, ParallelLayout, operators
from v41_config.capacity_report import plan_as_text, plot_plan
from v41_config.cli import main
from v41_config.config_schema import config_schema
from v41_config.errors import CapacityError
from v41_config.operator_listing import operators_as_markdown, operators_as_text

DEPLOYMENT = ["plan", "--context", "1048576", "--requests", "32", "--tp", "4", "--dp", "2"]
HAS_MATPLOTLIB = find_spec("matplotlib") is not None


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    plan = json.loads(printed(capsys, *DEPLOYMENT, "--json"))
    assert plan == CapacityPlan(FLASH, ParallelLayout(4, 2), 1048576, 32).to_json()
    assert plan["weights"]["routed_experts"] == 36097228800
    assert plan["hbm"] == 128 << 30


def test_every_option_reaches_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--bf16-cache", "--bf16-wo-a", "--without-engram", "--decode-tokens", "2", "--prefill-tokens", "8",
               "--max-logits", "1MiB", "--reserve", "2GB", "--hbm", "96GiB"]  # fmt: skip
    assumed = CapacityAssumptions(
        decode_tokens=2,
        prefill_tokens=8,
        bf16_cache=True,
        bf16_wo_a=True,
        engram=False,
        max_logits_bytes=1 << 20,
        reserved_bytes=2 * 10**9,
    )
    expected = CapacityPlan(FLASH, ParallelLayout(4, 2), 1048576, 32, assumed).to_json(96 << 30)
    assert json.loads(printed(capsys, *DEPLOYMENT, *options, "--json", code=1)) == expected


def test_plan_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, *DEPLOYMENT).splitlines()
    assert lines[0] == "one card of TP4 x DP2 (EP8): 32 requests per DP group (64 in all), 1,048,576 tokens each"
    assert "  routed_experts                  36,097,228,800 B    36.097 GB" in lines
    assert "  c2a_state                            1,572,864 B     0.002 GB" in lines
    assert lines[-4:-2] == [
        "largest context of 32 requests per DP group (64 in all): 1,048,576 tokens, limited by max_position_embeddings",
        "most requests of 1,048,576 tokens: 73 requests per DP group (146 in all), limited by hbm",
    ]


def test_the_table_is_of_the_card_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, *DEPLOYMENT, "--hbm", "80GiB", code=1).splitlines()
    plan, hbm = CapacityPlan(FLASH, ParallelLayout(4, 2), 1048576, 32), 80 << 30
    assert lines[2] == "DOES NOT FIT: 11,953,449,346 B more than the card has"
    assert plan.largest_context(hbm).value < 1048576
    assert f"{plan.largest_context(hbm).value:,} tokens, limited by hbm" in lines[-4]
    assert f": {plan.most_requests(hbm).value} requests per DP group" in lines[-3]
    assert f"free{-11_953_449_346:>44,} B{-11.953:>10} GB" in lines


def test_the_context_is_the_models_by_default_and_one_request_is_singular(capsys: pytest.CaptureFixture[str]) -> None:
    first = printed(capsys, "plan", "--preset", "tiny", "--tp", "1", "--dp", "1", "--requests", "1").splitlines()[0]
    assert first == "one card of TP1 x DP1 (EP1): 1 request per DP group, 4,096 tokens each"


def test_a_config_file_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY.to_released_json()))
    options = ["--tp", "2", "--dp", "2", "--requests", "3", "--json"]
    from_file = printed(capsys, "plan", "--config", str(tmp_path), *options)
    assert from_file == printed(capsys, "plan", "--preset", "tiny", *options)


def test_a_plan_that_just_fits_and_one_that_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["plan", "--preset", "tiny", "--requests", "1", "--tp", "1", "--dp", "1"]
    total = json.loads(printed(capsys, *options, "--json"))["total"]
    assert "DOES NOT FIT" not in printed(capsys, *options, "--hbm", f"{total}B")
    assert "DOES NOT FIT: 1 B more" in printed(capsys, *options, "--hbm", f"{total - 1}B", code=1)
    assert json.loads(printed(capsys, *options, "--hbm", f"{total - 1}B", "--json", code=1))["free"] == -1


def test_operators(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "operators") == operators_as_text(operators().values()) + "\n"
    assert printed(capsys, "operators", "--markdown") == operators_as_markdown(operators().values())
    assert printed(capsys, "operators", "greedy", "mhc_pre").startswith("greedy\n")


def test_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(printed(capsys, "schema")) == config_schema()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--context", "0"], "context: expected an integer of at least 1, found 0"),
        (["plan", "--context", "1048577"], "context: expected at most max_position_embeddings"),
        (["plan", "--requests", "-1"], "requests: expected an integer of at least 1, found -1"),
        (["plan", "--requests", "9" * 30], "requests: expected at most 1152921504606846976"),
        (["plan", "--decode-tokens", "9" * 30], "decode_tokens: expected at most 1152921504606846976"),
        (["plan", "--tp", "3"], "tp: expected a divisor of num_attention_heads = 64, found 3"),
        (["plan", "--tp", "0"], "tp: expected a size of at least 1, found 0"),
        (["plan", "--hbm", "lots"], "--hbm: expected a size above 0"),
        (["plan", "--config", "nowhere"], "nowhere: expected a readable config.json"),
        (["plan", "--hbm", "128"], "--hbm: expected a size above 0 with its unit, such as 128GiB or 64GB, found '128'"),
        (["operators", "mhc_pst"], "operator: expected an operator (did you mean mhc_post or mhc_pre"),
        (["operators", "xyzzy"], "operator: expected one of"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"v41-config: {message}")
    assert err.count("\n") == 1


def test_the_module_runs_as_a_command() -> None:
    command = [sys.executable, "-m", "v41_config"]
    good = subprocess.run([*command, "operators", "hc_head"], capture_output=True, text=True, check=True)
    assert good.stdout.startswith("hc_head\n")
    bad = subprocess.run([*command, "plan", "--tp", "3"], capture_output=True, check=False)
    assert bad.returncode == 2


def test_a_reader_may_stop_early() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "v41_config", "operators"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdout.close()
        assert (command.stderr.read(), command.wait()) == (b"", 0)


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs the extra plot")
def test_a_plot_is_a_png_and_replaces_what_was_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.png"
    path.write_text("old")
    assert "routed_experts" in printed(capsys, *DEPLOYMENT, "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs the extra plot")
def test_a_plot_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    plan = CapacityPlan(TINY, ParallelLayout(), 64, 1)
    (tmp_path / "plan.png").mkdir()
    for path in (tmp_path / "plan.png", tmp_path / "no" / "plan.png"):
        with pytest.raises(CapacityError, match="a file that can be written"):
            plot_plan(plan, 1 << 30, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.png"]


def test_a_plot_without_matplotlib_is_refused_before_anything_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*DEPLOYMENT, "--plot", str(tmp_path / "plan.png")]) == 2
    out, err = capsys.readouterr()
    assert (out, list(tmp_path.iterdir())) == ("", [])
    assert "pip install 'v41-config[plot]'" in err


def test_the_table_states_its_assumptions() -> None:
    text = plan_as_text(CapacityPlan(TINY, ParallelLayout(), 64, 1, CapacityAssumptions(bf16_cache=True)), 1 << 30)
    assert "caches in BF16; wo_a in FP8; Engram counted" in text
