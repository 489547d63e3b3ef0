"""`v41-kernels list`, `bench` and `devices`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from v41_config import FLASH, TINY
from v41_kernels import OPERATORS
from v41_kernels.bench_operands import bench_operands, bind_for_bench
from v41_kernels.cli import main
from v41_kernels.operator_work import operator_work

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pypto has wheels for Linux only")


def test_list_names_one_operator_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(OPERATORS)
    assert main(["list", "--json"]) == 0
    assert [entry["operator"] for entry in json.loads(capsys.readouterr().out)] == list(OPERATORS)


def test_the_package_is_its_command() -> None:
    listed = subprocess.run([sys.executable, "-m", "v41_kernels", "list"], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in listed.stdout.splitlines()] == list(OPERATORS)


def test_devices_are_listed_with_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices"]) == 0
    assert all(device["source"] for device in json.loads(capsys.readouterr().out))


def test_devices_of_a_file_are_listed_with_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the command prints is what it reads; a file's device replaces one of its name."""
    assert main(["devices"]) == 0
    listed = json.loads(capsys.readouterr().out)
    mine = [{**listed[0], "memory_gb": 1}, {**listed[0], "name": "mine"}]
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(mine))
    assert main(["devices", "--devices", str(file)]) == 0
    assert json.loads(capsys.readouterr().out) == [mine[0], *listed[1:], mine[1]]
    file.write_text("[1]")
    assert main(["devices", "--devices", str(file)]) == 2
    assert "mine.json[0]: expected an object" in capsys.readouterr().err


@LINUX
def test_bench_measures_kernels_and_compositions(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["rms_norm", "qkv_proj_rope"]
    assert main(["bench", *names, "--preset", "tiny", "--rows", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    norm, projections = report["operators"]
    assert [norm["operator"], projections["operator"]] == names
    assert (norm["launches"], projections["launches"]) == (1, 3)
    assert norm["bytes_moved"] == 2 * 2 * TINY.hidden_size * 2 + TINY.hidden_size * 2
    assert norm["matmul_flops"] == 0
    assert projections["matmul_flops"] > 0
    for result in (norm, projections):
        assert result["compile_seconds"] > 0
        assert result["graph_operations"] > 10
        assert result["roofline_seconds"] > 0
        assert result["cost_model_cycles"] == "not covered" or result["cost_model_cycles"] > 100


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "softmax"], "softmax"),
        (["bench", "rms_norm", "--device", "abacus"], "abacus"),
        (["bench", "rms_norm", "--platform", "npu"], "npu"),
        (["bench", "rms_norm", "--timeout", "inf"], "timeout: expected more than 0"),
        (["bench", "rms_norm", "--timeout", "nan"], "timeout: expected more than 0"),
        (["bench", "rms_norm", "--timeout", "0"], "timeout: expected more than 0"),
    ],
)
def test_what_bench_cannot_do_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("rows", ["0", "-1", "abc", "1e3", "1" * 10, "\u0663"])
def test_rows_are_a_positive_number(capsys: pytest.CaptureFixture[str], rows: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "rms_norm", f"--rows={rows}"])
    assert ended.value.code == 2
    assert "expected a number from 1 to" in capsys.readouterr().err


@pytest.mark.parametrize("name", OPERATORS)
def test_bench_operands_keep_the_contract(name: str) -> None:
    bound = bind_for_bench(name, TINY, 3)
    bound.check(bench_operands(bound))


def test_the_work_of_a_linear_is_its_operands_and_two_operations_a_product() -> None:
    bound = bind_for_bench("bf16_linear", FLASH, 4)
    n, k = bound.dims["N"], bound.dims["K"]
    work = operator_work(bound)
    assert work.matmul_flops == 2 * 4 * n * k
    assert work.bytes_moved == 2 * (4 * k + n * k + 4 * n)
    assert work.intensity == work.matmul_flops / work.bytes_moved


def test_of_a_pool_only_the_named_rows_count() -> None:
    bound = bind_for_bench("publish_window_kv", FLASH, 4)
    rows = 4 * (FLASH.head_dim + FLASH.head_dim // 32)
    assert operator_work(bound).bytes_moved == 4 * FLASH.head_dim * 2 + 4 * 8 + 2 * rows


def test_of_experts_only_those_that_rows_can_reach_count() -> None:
    few, many = (operator_work(bind_for_bench("routed_experts", FLASH, rows)).bytes_moved for rows in (1, 2))
    assert 1.9 < many / few < 2.1
