"""Kernels inside the running model: the installed provider, found by its name, beside the goldens call by call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from v41_model import OperatorProvider
from v41_model.cli import main
from v41_model.operator_calls import CALLS
from v41_model.operator_provider import find_provider


@pytest.fixture
def options(tiny_checkpoint: Path, tmp_path: Path) -> list[str]:
    requests = tmp_path / "requests.json"
    requests.write_text(json.dumps({"requests": [[0, 17, 42], [0, 99]]}))
    shared = ["--checkpoint", str(tiny_checkpoint), "--requests", str(requests), "--threads", "1", "--tp", "2"]
    return ["generate", *shared, "--max-new-tokens", "1", "--no-stream"]


def test_the_kernels_are_a_provider() -> None:
    provider = find_provider("pypto")
    assert isinstance(provider, OperatorProvider)
    assert {"rms_norm", "mhc_post", "materialize_rope_rows"} <= set(provider.names()) & set(CALLS)


def test_exchanged_kernels_change_no_bit_and_no_token(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Operators whose kernels leave no choice of arithmetic, on two ranks, in every layer."""
    assert main(options) == 0
    golden = capsys.readouterr().out.splitlines()
    assert main([*options, "--swap", "rms_norm,mhc_post,materialize_rope_rows=pypto"]) == 0
    swapped = capsys.readouterr().out.splitlines()
    assert swapped[: len(golden)] == golden
    report = swapped[len(golden) :]
    assert report[-1] == "swap: every bit is the golden's"
    calls = {line.split(": ")[1]: int(line.split(": ")[2].split()[0]) for line in report[:-1]}
    assert calls["mhc_post out"] == 2 * 2 * 10, "two sublayers of ten layers on two ranks"
    assert calls["rms_norm out"] == 2 * (2 * 10 + 1)


@pytest.mark.kernels
def test_every_kernel_at_once(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All single operators of the model as kernels: what differs stays within the judges' bounds."""
    requests = tmp_path / "requests.json"
    requests.write_text(json.dumps({"requests": [[0, 17, 42, 99, 7]]}))
    options = ["--checkpoint", str(tiny_checkpoint), "--requests", str(requests), "--threads", "1", "--tp", "2"]
    assert main(["generate", *options, "--max-new-tokens", "1", "--swap", "all=pypto"]) == 0
    report = [line for line in capsys.readouterr().out.splitlines() if line.startswith("swap: ")]
    assert len(report) > 30
    assert all(line.endswith(" 0 calls rejected") for line in report if "calls, " in line)
