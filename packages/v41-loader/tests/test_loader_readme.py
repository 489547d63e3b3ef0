"""The README's examples run and print what it says."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def failures_in(markdown: str) -> int:
    """Run the examples in order, with the names of the earlier ones; the code fences are no expected output."""
    text = re.sub(r"^```\w*$", "", markdown, flags=re.MULTILINE)
    example = doctest.DocTestParser().get_doctest(text, {}, README.name, str(README), 0)
    assert len(example.examples) == 18
    return doctest.DocTestRunner().run(example).failed


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert failures_in(README.read_text(encoding="utf-8")) == 0


def test_a_wrong_number_in_the_readme_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert failures_in(README.read_text(encoding="utf-8").replace("8670256", "8670257")) == 1
