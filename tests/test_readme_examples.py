"""The examples in the READMEs run: every `python` and `sh` block of one README, in order, in an empty directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

WORKSPACE = Path(__file__).parents[1]
READMES = [WORKSPACE / "README.md", *sorted(WORKSPACE.glob("packages/*/README.md"))]
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def script_of(readme: str) -> str:
    """One Python program that does what the README's blocks do; blocks for make or pip are left out."""
    parts = ["import subprocess as _subprocess"]
    for language, text in BLOCK.findall(readme):
        if language == "python":
            parts.append(text)
        elif not re.search(r"^(make|pip) ", text, re.MULTILINE):
            parts.append(f"_subprocess.run(['bash', '-euc', {text!r}], check=True)")
    return "\n".join(parts)


def run(readme: str, directory: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, "-c", script_of(readme)],
        cwd=directory,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_examples_run(readme: Path, tmp_path: Path) -> None:
    completed = run(readme.read_text(), tmp_path)
    assert completed.returncode == 0, completed.stdout + completed.stderr


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_links_lead_somewhere(readme: Path) -> None:
    assert [link for link in LINK.findall(readme.read_text()) if not (readme.parent / link).exists()] == []


@pytest.mark.parametrize("block", ["```python\nassert 1 == 2\n```\n", "```sh\nfalse\ntrue\n```\n"])
def test_a_broken_example_is_found(block: str, tmp_path: Path) -> None:
    assert run(block, tmp_path).returncode != 0


def test_blocks_share_names_and_files(tmp_path: Path) -> None:
    readme = (
        "```python\nx = 'a file'\n```\ntext\n```sh\necho 3 > 'a file'\n```\n```python\nprint(open(x).read())\n```\n"
    )
    assert run(readme, tmp_path).stdout == "3\n\n"
