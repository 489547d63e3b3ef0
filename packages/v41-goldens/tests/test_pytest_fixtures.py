"""The plugin's presets, batches, ranks and layouts in a test run of their own."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

KERNELS = """
import pytest
import torch
from v41_goldens.operators import golden

LAYOUTS = pytest.mark.v41_layouts((1, 1), (2, 2), (4, 1))


def kernel(bounds, arguments, name="mhc_pre", spoil=None):
    golden(bounds[0].spec.name).run_ranks(bounds, arguments)
    for given in arguments:
        if spoil is not None:
            spoil(given)


@LAYOUTS
def test_precision(v41_validate):
    result = v41_validate("mhc_pre", kernel, tokens=9)
    assert result.passed, result.error


@LAYOUTS
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_half_layer(v41_validate, v41_layout, phase):
    result = v41_validate(f"{phase}_swa", kernel, tokens=9, requests=3, phase=phase)
    assert result.passed, result.error
    assert {c.tensor.split()[0] for c in result.checks} == {"replicated", "sharded"}
    assert {int(c.tensor.split()[2]) for c in result.checks} == set(range(v41_layout.world_size))


@LAYOUTS
def test_golden(v41_validate):
    assert v41_validate("rms_norm").passed


SPOILED = {
    "one row 3 % off": lambda given: given["out"][4].mul_(1.03),
    "padding written": lambda given: given["out"][-1].zero_(),
    "NaN": lambda given: given["out"][0, 0].fill_(torch.nan),
    "operand written": lambda given: given["x_hc"][2].zero_(),
    "nothing written": lambda given: given["out"].view(torch.uint8).fill_(0xA5),
}


@pytest.mark.parametrize("spoil", SPOILED)
def test_wrong_kernel(v41_validate, spoil):
    result = v41_validate("mhc_pre", lambda b, a: kernel(b, a, spoil=SPOILED[spoil]))
    assert result.passed, result.error


def test_wrong_codes(v41_validate):
    def spoil(given):
        given["window_kv"].view(torch.uint8).view(-1, 64)[given["slots"][0]] ^= 1

    result = v41_validate("publish_window_kv", lambda b, a: kernel(b, a, spoil=spoil))
    assert result.passed, result.error


def test_tools(v41_presets, v41_case, v41_batch, v41_rank_simulator, v41_layout, v41_relative_budget):
    tiny = v41_presets["tiny"]
    case = v41_case(config=tiny, phase="decode")
    assert (case.tokens, case.active_tokens, case.requests) == (33, 31, 6)
    assert v41_batch(case).metadata.query_lens.tolist() == [6, 5, 5, 5, 5, 5]
    assert len(v41_rank_simulator(tiny, type(v41_layout)(2, 2)).tp_groups()) == 2
    assert v41_relative_budget.l2 == 0.01


@pytest.mark.v41_layouts((3, 0))
def test_no_layout(v41_layout):
    pass
"""


@pytest.fixture(autouse=True)
def _one_thread_in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_cases_of_a_kernel_author(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_kernels=KERNELS)
    result = pytester.runpytest_subprocess(
        "-q", "-p", "v41_goldens.pytest_plugin", "-p", "no:cacheprovider", "--strict-markers", "-rA"
    )
    result.assert_outcomes(passed=13, failed=6, errors=1)
    result.stdout.fnmatch_lines([
        "PASSED test_kernels.py::test_precision[[]2-2[]]",
        "PASSED test_kernels.py::test_half_layer[[]4-1-decode[]]",
    ], consecutive=False)  # fmt: skip
    text = result.stdout.str()
    for spoiled in ("one row 3 % off", "padding written", "NaN", "operand written", "nothing written"):
        assert f"FAILED test_kernels.py::test_wrong_kernel[{spoiled}]" in text
    assert "FAILED test_kernels.py::test_wrong_codes" in text
    assert "replicated rank 0 out: expected every byte of the inactive rows as before" in text
    assert "LayoutError: " in text
    assert (
        "v41_layouts(*pairs)"
        in pytester.runpytest_subprocess("-p", "v41_goldens.pytest_plugin", "--markers").stdout.str()
    )
