"""The examples run as they are."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def exit_code(name: str, argument: str, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", [name, argument])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return ended.value.code


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_help_and_bad_input_are_no_tracebacks(
    example: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(example.name, "--help", monkeypatch) == 0
    assert capsys.readouterr().out.startswith(f"usage: {example.name} [-h] CHECKPOINT_DIRECTORY")
    assert exit_code(example.name, "nowhere/at/all", monkeypatch) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "nowhere/at/all" in line


def test_generate_on_eight_ranks(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("generate_on_eight_ranks.py", str(tiny_directory), monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[0, 17, 42] -> [")
    assert any("token_reduce_scatter" in line and "attention output (layer 0)" in line for line in lines)


def test_serving_loop(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("serving_loop.py", str(tiny_directory), monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "step 2: [['A@3', 'C@0'], ['B@8', 'D@0']]" in lines, "chunks of a prompt beside requests that decode"
    assert any(line.startswith("  E waits: pool requests: expected 1 free blocks") for line in lines)
    answers = {line.split()[0]: line.split(" -> ")[1] for line in lines if " -> " in line}
    assert set(answers) == {"A", "B", "C", "E"}, "D was cancelled"
    assert answers["A"] == answers["E"]
