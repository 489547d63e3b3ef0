"""The pytest plugin: light until it is used, and it fails the tests that it has to fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from xml.etree import ElementTree

import pytest

import v41_goldens

PLUGIN = "v41_goldens.pytest_plugin"


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


def run_pytest(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(directory, "-m", "pytest", "-q", "-p", PLUGIN, "-p", "no:cacheprovider", *arguments)


TESTS = """
import pytest
import torch

EXPECTED = torch.ones(6, 8)
ROW_OFF = EXPECTED.clone()
ROW_OFF[4] *= 1.03


def test_accepts(v41_assert_output):
    v41_assert_output(EXPECTED * 1.001, EXPECTED, "hidden")


def test_rejects(v41_assert_output):
    v41_assert_output(ROW_OFF, EXPECTED, "hidden")


def test_active_rows(v41_assert_output):
    v41_assert_output(ROW_OFF, EXPECTED, active=4)


def test_judges(v41_judges):
    assert v41_judges.judge_equal_bits(EXPECTED, EXPECTED)


def test_verdict_in_the_report(v41_judges):
    assert v41_judges.judge_equal_bits(ROW_OFF, EXPECTED)


class TestOtherBounds:
    @pytest.fixture
    def v41_row_bounds(self, v41_judges):
        return v41_judges.RowBounds(rms_ratio=0.04)

    def test_accepts(self, v41_assert_output):
        v41_assert_output(ROW_OFF, EXPECTED)
"""


def test_the_judges_decide(tmp_path: Path) -> None:
    (tmp_path / "test_output.py").write_text(TESTS)
    result = run_pytest(tmp_path, "--junitxml=report.xml", "test_output.py")
    assert result.returncode == pytest.ExitCode.TESTS_FAILED
    assert "2 failed, 4 passed" in result.stdout
    assert "RemovedIn" not in result.stdout
    assert "FAILED test_output.py::test_rejects" in result.stdout
    assert "JudgementError: hidden: expected RMS(error) <= 1e-06 + 0.01 RMS(expected)" in result.stdout
    assert "1 of 6 rows are beyond a bound (1 in RMS, 0 in peak), the first at [4, 0]" in result.stdout
    assert "assert_output(" not in result.stdout.replace("v41_assert_output(", ""), "the plugin's own lines are hidden"
    assert "FAILED test_output.py::test_verdict_in_the_report" in result.stdout
    assert "8 of 48 elements differ" in result.stdout
    properties = {
        (case.attrib["classname"], case.attrib["name"]): str(item.attrib["value"])
        for case in ElementTree.parse(tmp_path / "report.xml").iter("testcase")
        for item in case.iter("property")
    }
    assert properties["test_output", "test_accepts"].startswith("accepted; 6 rows: relative L2 0.001")
    assert properties["test_output", "test_rejects"].startswith("1 of 6 rows are beyond a bound")
    assert properties["test_output", "test_active_rows"].startswith("accepted; 4 rows")


def test_the_example_of_the_readme_judges(tmp_path: Path) -> None:
    """As it stands it passes in every layout, with another bound's constant or a row too many it fails."""
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "import pytest" in block)
    for replaced, by, expected in (
        ("", "", "3 passed"),
        ('bound.constants["eps"]', "1.0", "3 failed"),
        ('rows = given["num_tokens"]', 'rows = given["num_tokens"] + 1', "3 failed"),
    ):
        (tmp_path / "test_example.py").write_text(example.replace(replaced, by) if replaced else example)
        assert expected in run_pytest(tmp_path, "test_example.py").stdout


def test_a_layout_that_is_no_pair_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_pair.py").write_text(
        "import pytest\n@pytest.mark.v41_layouts(1, 2)\ndef test_pair(v41_layout): pass\n"
    )
    result = run_pytest(tmp_path, "test_pair.py")
    assert result.returncode != 0
    message = "test_pair.py::test_pair: v41_layouts: expected pairs (tp, dp), such as (2, 2), found 1"
    assert message in result.stdout, result.stdout


def test_a_run_that_does_not_use_it_does_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "test_light.py").write_text("import sys\ndef test_light(): assert 'torch' not in sys.modules\n")
    result = run_pytest(tmp_path, "test_light.py")
    assert "1 passed" in result.stdout, result.stdout
    listing = run_pytest(tmp_path, "--fixtures", "test_light.py").stdout
    for fixture in ("v41_judges [session scope]", "v41_row_bounds [session scope]", "v41_assert_output"):
        assert fixture in listing


def test_importing_it_needs_neither_torch_nor_pytest(tmp_path: Path) -> None:
    program = f"import sys, {PLUGIN}; assert not sys.modules.keys() & {{'torch', 'numpy', 'pytest'}}"
    result = run(tmp_path, "-c", program)
    assert result.returncode == 0, result.stderr


def test_pytest_finds_it() -> None:
    assert [point.value for point in entry_points(group="pytest11") if point.name == PLUGIN] == [PLUGIN]


def test_the_public_names_are_what_their_modules_define() -> None:
    import_module("v41_goldens.block")  # binds no module over the function of that name
    assert list(v41_goldens._MODULE_OF) == v41_goldens.__all__
    for name, module in v41_goldens._MODULE_OF.items():
        assert getattr(v41_goldens, name) is getattr(sys.modules[f"v41_goldens.{module}"], name)
    with pytest.raises(AttributeError, match="module 'v41_goldens' has no attribute 'nothing'"):
        _ = v41_goldens.nothing  # type: ignore[attr-defined]
