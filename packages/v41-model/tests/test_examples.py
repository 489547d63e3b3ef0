"""The examples run as they are."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_generate_on_eight_ranks(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["example", str(tiny_directory)])
    runpy.run_path(str(EXAMPLES / "generate_on_eight_ranks.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[0, 17, 42] -> [")
    assert any("token_reduce_scatter" in line and "attention output (layer 0)" in line for line in lines)
