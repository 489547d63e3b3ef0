"""`v41-model verify-kernels`: verdicts, exit codes, and which of them are kept."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from v41_config.user_cache import user_cache_directory
from v41_kernels import CompiledVariant, Executor, KernelExecutionError, VariantCompiler
from v41_model import kernel_verification
from v41_model.cli import main
from v41_model.errors import CacheError
from v41_model.kernel_cases import KernelCase

STAND_IN_NPU = Path(__file__).parents[1] / "packages" / "v41-kernels" / "tests" / "stand_in_npu"

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pypto has wheels for Linux only")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Verdicts go to a directory of the test; the interpreter is still built once per user."""
    monkeypatch.setattr(
        "v41_model.verify_kernels_command.default_store_directory", lambda: tmp_path / "verified-kernels"
    )
    return tmp_path / "verified-kernels"


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["verify-kernels", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_accepted_cases_are_kept_and_not_run_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    code, first = report(capsys, "input_pack")
    assert code == 0
    assert first["accepted"] is True
    assert len(first["cases"]) == 6
    assert all(case["statistics"] for case in first["cases"])
    assert len(list(cache.iterdir())) == 1

    def run_nothing(*_: object, **__: object) -> None:
        raise AssertionError("a stored case was run")

    monkeypatch.setattr(Executor, "run", run_nothing)
    assert report(capsys, "input_pack") == (0, first)


def test_a_wrong_kernel_is_exit_code_1_and_is_not_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    """A kernel that writes nothing leaves the sentinel."""
    monkeypatch.setattr(Executor, "run", lambda *_, **__: None)
    code, refused = report(capsys, "input_pack")
    assert code == 1
    assert refused["accepted"] is False
    assert {case["accepted"] for case in refused["cases"] if " 0/" not in case["case"]} == {False}
    kept = [json.loads(file.read_text()) for file in cache.glob("*.json")]
    assert all(entry["accepted"] for entries in kept for entry in entries)


def test_a_kernel_that_fails_is_a_refusal_with_its_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from v41_kernels import KernelCrashError

    def crash(*_: object, **__: object) -> None:
        raise KernelCrashError("kernel input_pack", "worker killed by SIGSEGV", "an answer")

    monkeypatch.setattr(Executor, "run", crash)
    code, refused = report(capsys, "input_pack")
    assert code == 1
    assert all("SIGSEGV" in case["reasons"][0] for case in refused["cases"])


def test_what_stops_every_kernel_is_no_refusal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A cache directory that is a file: no case was run, so none is refused."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert main(["verify-kernels", "input_pack"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "XDG_CACHE_HOME names another" in captured.err
    assert captured.err.count("\n") == 1


KEPT: dict[str, Any] = {
    "operator": "input_pack", "case": "fixture", "tier": "graph", "accepted": True, "seconds": 0.1, "statistics": {},
    "reasons": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[", "it can be removed"),
        (b"\xff", "it can be removed"),
        (b"[" * 100_000, "it can be removed"),
        (b"{}", "it can be removed"),
        (json.dumps([{**KEPT, "accepted": "yes"}]).encode(), "0.accepted"),
        (json.dumps([{**KEPT, "statistics": {"out": 1}}]).encode(), "0.statistics.out"),
        (json.dumps([{**KEPT, "accepted": False}]).encode(), "input_pack: expected what was accepted"),
    ],
)
def test_a_store_that_nobody_wrote_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / ("0" * 32 + ".json")).write_bytes(json.dumps([KEPT]).encode())
    store = kernel_verification.VerdictStore(tmp_path, "0" * 64)
    assert store.find("input_pack", "fixture", "graph") is not None
    (tmp_path / ("0" * 32 + ".json")).write_bytes(content)
    with pytest.raises(CacheError, match=message):
        kernel_verification.VerdictStore(tmp_path, "0" * 64)


def test_other_sources_have_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    every = kernel_verification.source_digest()
    assert every == kernel_verification.source_digest()
    assert every != kernel_verification.source_digest(("v41_config", "v41_goldens"))


def test_a_name_without_a_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-kernels", "dispatch"]) == 2
    assert "dispatch" in capsys.readouterr().err


def test_cases_of_small_presets_reach_no_rows_and_ragged_tiles() -> None:
    made: list[KernelCase] = [make() for _, make in kernel_verification.named_cases("rms_norm", "tiny")]
    assert {(case.active, case.bound.dims["T"]) for case in made} >= {(0, 0), (0, 5), (1, 1), (11, 13), (17, 17)}


def test_a_device_is_judged_as_the_interpreter_is_and_nothing_is_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path
) -> None:
    """Plumbing, against a stand-in for a device: the interpreter's values, and other ones for one kernel."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(user_cache_directory("any").parent))
    monkeypatch.setenv("STAND_IN_NPU", str(tmp_path))
    monkeypatch.setenv("ASCEND_HOME_PATH", str(STAND_IN_NPU))
    monkeypatch.setenv("PATH", str(STAND_IN_NPU / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN_NPU), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(STAND_IN_NPU))
    (tmp_path / "fault").write_text("wrong rms_norm")
    code, judged = report(capsys, "input_pack", "rms_norm", "--platform", "npu", "--device-id", "1")
    assert code == 1
    assert {case["tier"] for case in judged["cases"]} == {"npu:1"}
    verdicts = {(case["operator"], case["accepted"]) for case in judged["cases"] if " 0/" not in case["case"]}
    assert verdicts == {("input_pack", True), ("rms_norm", False)}
    assert not cache.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--platform", "npu"], "ASCEND_HOME_PATH is not set"),
        (["--platform", "gpu"], "'cpu' or 'npu'"),
        (["--device-id", "1"], "cpu"),
    ],
)
def test_a_platform_that_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    assert main(["verify-kernels", "input_pack", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert len(captured.err.splitlines()) == 1


def run_no_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("v41_model.verify_kernels_command.named_cases", lambda name, preset: [])


@pytest.mark.kernels
@pytest.mark.parametrize("preset", ["tiny", "flash6"])
def test_a_variant_is_compiled_and_neither_accepted_nor_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cache: Path, preset: str
) -> None:
    run_no_cases(monkeypatch)
    code, document = report(capsys, "quantized_linear", "--preset", preset)
    assert code == 0
    (variant,) = document["variants"]
    assert variant["variant"] == "quantized_linear_a5"
    assert variant["operator"] == "quantized_linear"
    assert variant["architecture"] == "DAV_3510"
    assert variant["status"] == "compiled, not verified"
    assert variant["seconds"] > 0
    assert "accepted" not in variant
    assert not cache.exists()  # no verdict, so there is nothing to keep


@pytest.mark.parametrize("refused", [False, True])
def test_a_variant_does_not_change_the_verdict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    compiled = CompiledVariant("quantized_linear_a5", "quantized_linear", "DAV_3510", 1.5, {})
    monkeypatch.setattr(VariantCompiler, "compile", lambda *_, **__: compiled)
    result = kernel_verification.CaseResult("quantized_linear", "case", "graph", not refused, 0.5, {})
    monkeypatch.setattr("v41_model.verify_kernels_command.named_cases", lambda name, preset: [("case", None)])
    monkeypatch.setattr("v41_model.verify_kernels_command.verify_case", lambda *_: result)
    assert main(["verify-kernels", "quantized_linear"]) == int(refused)
    *_, line, summary = capsys.readouterr().out.splitlines()
    assert line == "quantized_linear_a5 [for the A5, 1.50 s] compiled, not verified"
    assert summary.endswith("; 1 of 1 variants compiled, not verified")
    assert report(capsys, "quantized_linear")[1]["accepted"] is not refused


def test_a_variant_that_does_not_compile_is_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise KernelExecutionError("variant quantized_linear_a5", "a reason", "a kernel that compiles")

    run_no_cases(monkeypatch)
    monkeypatch.setattr(VariantCompiler, "compile", refuse)
    code, document = report(capsys, "quantized_linear")
    assert code == 1
    assert document["accepted"] is False
    (variant,) = document["variants"]
    assert variant["status"] == "failed"
    assert variant["architecture"] is None
    assert "a reason" in variant["reason"]
    assert main(["verify-kernels", "quantized_linear"]) == 1
    line, summary = capsys.readouterr().out.splitlines()
    assert line.startswith("quantized_linear_a5 ")
    assert "FAILED KernelExecutionError: variant quantized_linear_a5" in line
    assert "0 of 1 variants" in summary


def test_a_variants_name_is_no_operators(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-kernels", "quantized_linear_a5"]) == 2
    assert "compiled, not verified" in capsys.readouterr().err
