"""The device path against a stand-in for a device: what is moved, launched and copied back, and what is missing.

These are tests of plumbing. No kernel has run on a device, here or anywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from v41_config import TINY
from v41_kernels import (
    Executor,
    KernelCrashError,
    KernelExecutionError,
    PlatformError,
    Tier,
    find_pypto,
)
from v41_kernels.bench import BenchResult, as_line, header
from v41_kernels.bench_operands import bench_operands, bind_for_bench
from v41_kernels.calculator import default_cache_directory
from v41_kernels.cli import main
from v41_kernels.device import Device, open_device
from v41_kernels.platforms import find_platform
from v41_kernels.provider import npu_provider
from v41_kernels.pypto_install import PyptoInstall

STAND_IN = Path(__file__).parent / "stand_in_npu"
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pypto has wheels for Linux only")


@pytest.fixture
def complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PyptoInstall:
    """A machine on which everything that is looked at is there."""
    package = tmp_path / "pypto"
    (package / "lib").mkdir(parents=True)
    (package / "lib" / "libtile_fwk_runtime.so").touch()
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(STAND_IN / "bin"), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(STAND_IN))
    return PyptoInstall(package, "0.2.0")


def test_a_complete_machine_is_accepted(complete: PyptoInstall) -> None:
    assert str(find_platform("npu", 3, complete)) == "npu:3"
    assert str(find_platform("cpu", 0, complete)) == "cpu"


def without_variable(patch: pytest.MonkeyPatch, package: Path) -> None:
    del package
    patch.delenv("ASCEND_HOME_PATH")


def without_directory(patch: pytest.MonkeyPatch, package: Path) -> None:
    patch.setenv("ASCEND_HOME_PATH", str(package / "nowhere"))


def without_compiler(patch: pytest.MonkeyPatch, package: Path) -> None:
    patch.setenv("PATH", str(package))


def without_linker(patch: pytest.MonkeyPatch, package: Path) -> None:
    (package / "bisheng").write_text("")
    (package / "bisheng").chmod(0o755)
    patch.setenv("PATH", str(package))


def without_torch_npu(patch: pytest.MonkeyPatch, package: Path) -> None:
    del package
    patch.setattr(sys, "path", [entry for entry in sys.path if entry != str(STAND_IN)])


def without_runtime(patch: pytest.MonkeyPatch, package: Path) -> None:
    del patch
    (package / "lib" / "libtile_fwk_runtime.so").unlink()


@pytest.mark.parametrize(
    ("take_away", "found", "remedy"),
    [
        (without_variable, "no CANN: ASCEND_HOME_PATH is not set", "set_env.sh"),
        (without_directory, "no directory .*nowhere, which ASCEND_HOME_PATH names", "set_env.sh"),
        (without_compiler, "no bisheng on PATH", "set_env.sh"),
        (without_linker, "no ld.lld on PATH", "set_env.sh"),
        (without_torch_npu, "no torch_npu", "torch_npu installed"),
        (without_runtime, "no .*libtile_fwk_runtime.so", "a pypto wheel with its device runtime"),
    ],
)
def test_each_missing_piece_is_named_with_what_to_do(
    complete: PyptoInstall,
    monkeypatch: pytest.MonkeyPatch,
    take_away: Callable[[pytest.MonkeyPatch, Path], None],
    found: str,
    remedy: str,
) -> None:
    take_away(monkeypatch, complete.package)
    with pytest.raises(PlatformError, match=f"found {found}") as caught:
        find_platform("npu", 0, complete)
    assert remedy in caught.value.expected


@LINUX
def test_the_provider_for_npus_asks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    with pytest.raises(PlatformError, match="no CANN"):
        npu_provider()


def test_a_cpu_has_no_device_id(complete: PyptoInstall) -> None:
    with pytest.raises(PlatformError, match=r"device id.*found '?1"):
        find_platform("cpu", 1, complete)


@LINUX
def test_the_wheel_has_what_is_looked_for() -> None:
    assert find_pypto().device_runtime.is_file()


def installed(monkeypatch: pytest.MonkeyPatch, **functions: object) -> None:
    """A torch_npu with these functions, beside what a machine with two devices has."""
    npu = ModuleType("torch.npu")
    whole = {"is_available": lambda: True, "device_count": lambda: 2, "set_device": lambda device_id: None}
    for name, function in {**whole, **functions}.items():
        setattr(npu, name, function)
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    monkeypatch.setattr(torch, "npu", npu, raising=False)


def fails(*_: object) -> None:
    raise RuntimeError("the device is busy")


@pytest.mark.parametrize(
    ("functions", "device_id", "message"),
    [
        ({"is_available": lambda: False}, 0, "npu-smi info.*is_available.. is False"),
        ({}, 2, "0 to 1: torch_npu finds 2, found '?2"),
        ({}, -1, "0 to 1: torch_npu finds 2, found '?-1"),
        ({"set_device": fails}, 1, "no other work holds.*the device is busy"),
    ],
)
def test_a_device_that_cannot_be_used_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, functions: dict[str, object], device_id: int, message: str
) -> None:
    installed(monkeypatch, **functions)
    with pytest.raises(PlatformError, match=message):
        open_device(device_id)


def test_the_device_that_is_asked_for_becomes_current(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    installed(monkeypatch, set_device=current.append)
    open_device(1)
    assert current == [1]


def test_a_torch_npu_that_cannot_be_imported_gives_its_own_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch_npu.py").write_text("raise OSError('libhccl.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    with pytest.raises(PlatformError, match=r"set_env\.sh.*cannot be imported: libhccl\.so"):
        open_device(0)


def test_a_library_that_pypto_misses_gives_its_own_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pypto 0.2.0 does where ASCEND_HOME_PATH is set and CANN's libraries are not found."""

    def session(scratch: Path) -> None:
        raise OSError("libascendcl.so: cannot open shared object file")

    installed(monkeypatch)
    monkeypatch.setattr("v41_kernels.device.CompilerSession", session)
    with pytest.raises(PlatformError, match=r"import pypto.*set_env\.sh.*libascendcl\.so"):
        Device(0, tmp_path)


class StandIn:
    """The stand-in's directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def launches(self) -> list[dict[str, Any]]:
        """What was launched since the last call."""
        log = self.directory / "log.jsonl"
        lines = log.read_text().splitlines()
        log.write_text("")
        return [json.loads(line) for line in lines]

    def fault(self, kind: str) -> None:
        (self.directory / "fault").write_text(kind)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    directory = tmp_path_factory.mktemp("stand-in")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(default_cache_directory().parent))
        environment.setenv("STAND_IN_NPU", str(directory))
        environment.setenv("ASCEND_HOME_PATH", str(STAND_IN))
        environment.setenv("PATH", str(STAND_IN / "bin"), prepend=os.pathsep)
        environment.setenv("PYTHONPATH", str(STAND_IN), prepend=os.pathsep)
        environment.syspath_prepend(str(STAND_IN))
        yield StandIn(directory)


@pytest.fixture(scope="module")
def device(stand_in: StandIn) -> Iterator[Executor]:
    if not sys.platform.startswith("linux"):
        pytest.skip("pypto has wheels for Linux only: no kernel was executed")
    with Executor(platform="npu", device_id=1, timeout=300.0) as started:
        yield started


def operands(name: str) -> dict[str, Any]:
    """Arguments whose destinations hold a sentinel."""
    bound = bind_for_bench(name, TINY, 3)
    made = bench_operands(bound)
    for destination in bound.spec.destinations:
        tensor = made[destination]
        assert isinstance(tensor, Tensor)
        tensor.view(torch.uint8).fill_(0x11)
    return made


def raw(arguments: dict[str, Any], name: str) -> Tensor:
    tensor = arguments[name]
    assert isinstance(tensor, Tensor)
    return tensor.view(torch.uint8)


NAMES = {
    "rms_norm": "rms_norm",  # plain tensors and a count
    "embed": "embed",  # an INT64, given to the kernel as pairs of INT32
    "quantized_linear": "quantized_linear",  # codes and scales, given as INT8
    "lm_head": "bf16_linear",  # parameters of other names, and the entry of another module
}


@pytest.mark.parametrize("name", NAMES)
def test_entries_and_tensors_are_those_of_the_interpreter_and_launched_as_pypto_does(
    device: Executor, executor: Executor, stand_in: StandIn, name: str
) -> None:
    stand_in.launches()
    on_device, interpreted = operands(name), operands(name)
    run = device.run(name, **on_device)
    executor.run(name, **interpreted)
    (launch,) = stand_in.launches()
    destinations = bind_for_bench(name, TINY, 3).spec.destinations
    assert all(torch.equal(raw(on_device, out), raw(interpreted, out)) for out in destinations)
    assert not any((raw(on_device, out) == 0x11).all() for out in destinations)
    assert launch["kernel"] == f"v41_kernels.kernels.{NAMES[name]}"
    assert "make_entry" in launch["entry"]
    assert launch["run_mode"] == 0  # pypto.RunMode.NPU; SIM is 1
    assert launch["verify_options"] is None
    assert launch["compile_stage"] == 0  # pypto.CompStage.ALL_COMPLETE
    assert set(launch["devices"]) == {"npu:1"}
    assert launch["stream"] == 4711
    assert launch["ascend_home"] == str(STAND_IN)
    assert (run.tier, run.checks) == (None, ())


def test_a_compiled_entry_is_launched_again(device: Executor, stand_in: StandIn) -> None:
    stand_in.launches()
    for _ in range(2):
        device.run("mhc_pre", **operands("mhc_pre"))
    device.run("hc_head", **operands("hc_head"))  # the same kernel for the same sizes
    device.run("mhc_post", **operands("mhc_post"))
    modules = [launch["module"] for launch in stand_in.launches()]
    assert len(set(modules)) == 2
    assert len(set(modules[:3])) == 1


def test_a_composition_is_launch_after_launch_on_the_device(device: Executor, stand_in: StandIn) -> None:
    stand_in.launches()
    run = device.run("qkv_proj_rope", **operands("qkv_proj_rope"))
    assert len(stand_in.launches()) == len(run.launches) == 3


def test_bench_gives_the_median_of_timed_launches_after_others(
    device: Executor, stand_in: StandIn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in's n-th pair of events is n milliseconds apart."""
    asked: list[dict[str, object]] = []

    def executor_of(**options: object) -> contextlib.nullcontext[Executor]:
        asked.append(options)
        return contextlib.nullcontext(device)

    monkeypatch.setattr("v41_kernels.executor.Executor", executor_of)
    stand_in.launches()
    command = ["bench", "input_pack", "--preset", "tiny", "--rows", "2", "--json"]
    assert main([*command, "--platform", "npu", "--device-id", "1"]) == 0
    assert asked == [{"platform": "npu", "device_id": 1, "tier": None, "timeout": 1800.0}]
    assert len(stand_in.launches()) == 1 + 23 + 1  # compiled, timed, and the run that writes
    report = json.loads(capsys.readouterr().out)
    assert (report["platform"], report["tier"]) == ("npu:1", None)
    result = BenchResult(**report["operators"][0])
    assert result.device_seconds == pytest.approx(statistics.median(range(4, 24)) / 1e3)
    assert result.compile_seconds is not None
    assert result.graph_operations == 1
    assert (result.cpu_seconds, result.cost_model_cycles) == (None, None)
    assert header(device).split()[-4:] == ["device", "us", "of", "roofline"]
    *_, microseconds, share = as_line(result).split()
    assert microseconds == "13500.0"
    assert share.endswith("%")


@pytest.mark.parametrize("tier", Tier)
def test_a_device_takes_no_tier(device: Executor, tier: Tier) -> None:
    with pytest.raises(PlatformError, match=f"npu:1.*found tier {tier.value}"):
        device.run("rms_norm", tier, **operands("rms_norm"))


def test_wrong_values_of_a_device_reach_the_caller(device: Executor, executor: Executor, stand_in: StandIn) -> None:
    """So nothing else computes them."""
    stand_in.fault("wrong")
    try:
        on_device, interpreted = operands("rms_norm"), operands("rms_norm")
        device.run("rms_norm", **on_device)
    finally:
        stand_in.fault("")
    executor.run("rms_norm", **interpreted)
    assert torch.equal(raw(on_device, "out"), ~raw(interpreted, "out"))


@pytest.mark.parametrize(
    ("fault", "kind", "reason"),
    [
        ("synchronize", KernelExecutionError, "stand-in: the device reports an error"),
        ("crash", KernelCrashError, "killed by SIGSEGV"),
    ],
)
def test_a_failure_on_the_device_writes_nothing(
    device: Executor, stand_in: StandIn, fault: str, kind: type[Exception], reason: str
) -> None:
    """Both after the device has written its memory."""
    arguments = operands("rms_norm")
    stand_in.fault(fault)
    try:
        with pytest.raises(kind, match=reason) as caught:
            device.run("rms_norm", **arguments)
    finally:
        stand_in.fault("")
    assert isinstance(caught.value, KernelExecutionError)
    assert caught.value.where == "kernel rms_norm (npu:1)"
    assert (raw(arguments, "out") == 0x11).all()
    assert device._worker is None
