"""The executor: what it leaves behind (nothing), and what becomes of kernels and workers that fail."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from v41_config import OperatorError, OperatorSpec
from v41_config.operator_spec import TensorSpec
from v41_kernels import (
    OPERATORS,
    CanaryError,
    Executor,
    KernelCrashError,
    KernelError,
    KernelExecutionError,
    KernelOperator,
    KernelTimeoutError,
    PassVerificationError,
    PlatformError,
    Tier,
)
from v41_kernels.compiler_session import the_only_file

FAULTY_KERNELS = Path(__file__).parent / "faulty_kernels"
FAULTY = ("killed", "exits", "endless", "greedy", "overflowing", "spilling", "no_such_module")


def faulty_operator(kernel: str) -> KernelOperator:
    """`out = 2 x`, by a kernel of tests/faulty_kernels."""
    tensors = (TensorSpec("x", ("T", "D"), "float32"), TensorSpec("out", ("T", "D"), "float32", "out"))
    return KernelOperator(OperatorSpec(kernel, tensors, (), "out = 2 x"), kernel)


def test_a_large_launch_leaves_its_memory_to_the_next(executor: Executor) -> None:
    """The interpreter keeps all that it decoded until the next launch has ended, if nobody makes it let go."""
    inputs, outputs = 5120, 1024
    codes = torch.zeros(outputs, inputs, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.full((outputs // 32, inputs // 32), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    x, out = torch.ones(1, inputs).bfloat16(), torch.ones(1, outputs).bfloat16()

    def most_megabytes() -> int:
        assert executor._worker is not None
        status = Path(f"/proc/{executor._worker._process.pid}/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) // 1024

    run = functools.partial(executor.run, "quantized_linear", x=x, w=codes, w_scale=scale, out=out)
    executor.close()
    run(num_tokens=0)
    idle = most_megabytes()
    run()
    first = most_megabytes() - idle
    run()
    assert not out.any()
    assert first > 300
    assert most_megabytes() - idle < 1.3 * first


@pytest.fixture(scope="module")
def faulty(executor: Executor) -> Iterator[Executor]:
    """An executor that also knows the faulty kernels; its worker finds their modules."""
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(FAULTY_KERNELS), *([before] if before else [])])
    operators = dict(OPERATORS) | {kernel: faulty_operator(kernel) for kernel in FAULTY}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", path)
        with Executor(operators=operators, timeout=300.0) as started:
            yield started


SHAPES = {"overflowing": (256, 1024), "spilling": (13, 1024)}
"""Rows and columns with which a kernel fails in the passes, and only there."""


def arguments(rows: int, columns: int) -> dict[str, Tensor]:
    x = (torch.arange(rows * columns) % 64).float().view(rows, columns)
    return {"x": x, "out": torch.full((rows, columns), -7.0)}


def assert_works(executor: Executor) -> None:
    """A sound kernel gives its values."""
    x = torch.full((3, 32), 2.0, dtype=torch.bfloat16)
    out = torch.zeros_like(x)
    executor.run("rms_norm", x=x, weight=torch.full((32,), 3.0, dtype=torch.bfloat16), out=out)
    assert torch.equal(out, torch.full_like(out, 3.0))


@pytest.mark.parametrize(
    ("kernel", "tier", "kind", "reason"),
    [
        ("killed", Tier.GRAPH, KernelCrashError, "killed by SIGSEGV"),
        ("exits", Tier.GRAPH, KernelCrashError, "ended with status 7; log ends in: last words of the worker, D = 32"),
        ("greedy", Tier.GRAPH, KernelExecutionError, "MemoryError"),
        ("no_such_module", Tier.GRAPH, KernelExecutionError, "ModuleNotFoundError"),
        ("overflowing", Tier.PASSES, KernelExecutionError, "exceeds MEM_UB size"),
        ("spilling", Tier.PASSES, PassVerificationError, "Pass_36_CodegenPreproc.*COPY_IN"),
    ],
)
def test_a_failure_names_the_kernel_and_the_next_run_works(
    faulty: Executor, kernel: str, tier: Tier, kind: type[Exception], reason: str
) -> None:
    given = arguments(*SHAPES.get(kernel, (8, 32)))
    with pytest.raises(kind, match=reason) as caught:
        faulty.run(kernel, tier, x=given["x"], out=given["out"])
    assert isinstance(caught.value, KernelExecutionError)
    assert f"kernel {kernel} (tier {tier.value})" in caught.value.where
    assert torch.equal(given["out"], torch.full_like(given["out"], -7.0))
    assert_works(faulty)


@pytest.mark.parametrize("kernel", SHAPES)
def test_faults_of_the_passes_do_not_show_in_the_tensor_graph(faulty: Executor, kernel: str) -> None:
    """So the two tiers are different things; and the faulty kernels fail for the reason given, not for a typo."""
    given = arguments(*SHAPES[kernel])
    faulty.run(kernel, Tier.GRAPH, x=given["x"], out=given["out"])
    assert torch.equal(given["out"], given["x"] * 2)


def test_a_kernel_that_does_not_end_is_stopped(faulty: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_works(faulty)
    given = arguments(8, 32)
    monkeypatch.setattr(faulty, "_timeout", 0.3)
    started = time.monotonic()
    with pytest.raises(KernelTimeoutError, match=r"no answer after 0\.3 s") as caught:
        faulty.run("endless", x=given["x"], out=given["out"])
    assert time.monotonic() - started < 30
    assert caught.value.where == "kernel endless (tier graph)"
    monkeypatch.setattr(faulty, "_timeout", 300.0)
    assert_works(faulty)


@pytest.mark.parametrize("files", [0, 2])
def test_values_that_the_verifier_did_not_write_down_are_an_error(files: int, tmp_path: Path) -> None:
    for number in range(files):
        (tmp_path / f"tensor_graph~3~{number}.data").touch()
    with pytest.raises(KernelExecutionError, match=f"found {files} of tensor_graph") as caught:
        the_only_file("kernel k", f"{tmp_path}/tensor_graph~3~[0-9]*.data")
    assert caught.value.where == "kernel k"


def test_an_interrupt_leaves_no_stale_answer(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a kernel runs: its late answer must not be taken for that of the next kernel."""
    assert_works(executor)
    worker = executor._worker
    assert worker is not None

    def interrupt(where: str, timeout: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "_receive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        assert_works(executor)
    assert executor._worker is None
    executor.close()  # what is closed twice, or was never started, starts with the next run
    executor.close()
    assert_works(executor)


def test_nothing_is_left_behind(executor: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file in the home or working directory, no scratch, no process, no changed logger or environment."""
    home, working, temporary = (tmp_path / name for name in ("home", "working", "temporary"))
    for directory in (home, working, temporary):
        directory.mkdir()
    code = f"""
import logging, os, sys, tempfile, torch
from pathlib import Path
from v41_kernels import Executor, Tier
before = (logging.root.level, list(logging.root.handlers), dict(os.environ), os.getcwd())
x = torch.ones(3, 32, dtype=torch.bfloat16)
out = torch.zeros_like(x)
with Executor(cache_directory=Path({str(executor._cache_directory)!r})) as started:
    for tier in Tier:
        started.run("rms_norm", tier, x=x, weight=x[0].clone(), out=out)
        assert torch.equal(out, x)
    print(started._worker._process.pid)
    during = os.listdir(tempfile.gettempdir())
    assert len(during) == 1 and during[0].startswith("v41-kernels-"), during
assert before == (logging.root.level, logging.root.handlers, dict(os.environ), os.getcwd())
assert "pypto" not in sys.modules
"""
    variables = dict(os.environ) | {"HOME": str(home), "TMPDIR": str(temporary)}
    completed = subprocess.run(
        [sys.executable, "-c", code], cwd=working, env=variables, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr
    assert [list(directory.iterdir()) for directory in (home, working, temporary)] == [[], [], []]
    with pytest.raises(ProcessLookupError):
        os.kill(int(completed.stdout), 0)


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_a_worker_whose_parent_is_killed_goes_too(executor: Executor, tmp_path: Path, state: str) -> None:
    """At once if it waits for work; else when the kernel is done and nobody takes the answer."""
    assert_works(executor)  # so the calculator is built
    code = f"""
import os, signal, threading, time, torch
from pathlib import Path
from v41_config import find_operator
from v41_kernels import Executor, KernelOperator, OPERATORS
spec = find_operator("rms_norm")
operators = dict(OPERATORS) | {{"slow": KernelOperator(spec, "slow")}}
x = torch.ones(3, 32, dtype=torch.bfloat16)
started = Executor(cache_directory=Path({str(executor._cache_directory)!r}), operators=operators)
run = lambda name: started.run(name, x=x, weight=x[0].clone(), out=torch.zeros_like(x))
run("rms_norm")
print(started._worker._process.pid, flush=True)
if {state == "busy"}:
    threading.Thread(target=run, args=("slow",)).start()
    time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = os.pathsep.join([str(FAULTY_KERNELS), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = dict(os.environ) | {"TMPDIR": str(tmp_path), "PYTHONPATH": path}
    completed = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)
    assert completed.stdout, completed.stderr
    worker = int(completed.stdout)
    deadline = time.monotonic() + 60
    while (list(tmp_path.iterdir()) or is_running(worker)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []
    assert not is_running(worker)


def is_running(process: int) -> bool:
    """Whether the process exists and is no zombie (its new parent may not have noticed its end)."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


IN_A_FRESH_PROCESS = """
import logging, os, sys, tempfile
from pathlib import Path
from v41_kernels import CanaryError, find_pypto
from v41_kernels.calculator import calculator_library
from v41_kernels.canary import check_canary
from v41_kernels.interpreter import Interpreter
scratch = Path(tempfile.mkdtemp())
os.environ["HOME"] = os.environ["ASCEND_PROCESS_LOG_PATH"] = str(scratch)
environ, variables = os.environ, dict(os.environ)
level, handlers = logging.root.level, list(logging.root.handlers)
interpreter = Interpreter(calculator_library(find_pypto(), Path(sys.argv[1])), scratch)
assert os.environ is environ and dict(os.environ) == variables
assert (logging.root.level, logging.root.handlers) == (level, handlers)
"""


def in_a_fresh_process(executor: Executor, code: str, directory: Path) -> str:
    command = [sys.executable, "-c", IN_A_FRESH_PROCESS + code, str(executor._cache_directory)]
    variables = dict(os.environ) | {"TMPDIR": str(directory)}
    completed = subprocess.run(command, cwd=directory, env=variables, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_the_canary_dies_of_the_stock_behaviour(executor: Executor, tmp_path: Path) -> None:
    """Unchanged, pypto interprets kernels on zeros and says nothing; with our change the canary lives."""
    assert_works(executor)  # so the calculator is built
    code = """
try:
    check_canary(interpreter)
except CanaryError as error:
    print(error)
interpreter.hand_over_tensors()
check_canary(interpreter)
print("alive")
"""
    command = [sys.executable, "-c", IN_A_FRESH_PROCESS + code, str(executor._cache_directory)]
    variables = dict(os.environ) | {"TMPDIR": str(tmp_path)}
    completed = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    assert "found the answer for x = 0: the tensors do not arrive" in completed.stdout
    assert completed.stdout.splitlines()[-1] == "alive"


def test_a_worker_with_a_dead_canary_is_not_used(
    executor: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the worker's start reaches the caller by its type."""
    (tmp_path / "sitecustomize.py").write_text(
        "import v41_kernels.interpreter as interpreter\ninterpreter.Interpreter.hand_over_tensors = lambda self: None\n"
    )
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *([before] if before else [])]))
    with Executor() as started, pytest.raises(CanaryError, match="do not arrive"):
        assert_works(started)


def test_threads_take_turns(executor: Executor) -> None:
    failures: list[Exception] = []

    def work() -> None:
        try:
            for _ in range(3):
                assert_works(executor)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_nothing_is_launched_for_a_wrong_call(executor: Executor) -> None:
    with Executor() as started:
        with pytest.raises(OperatorError):
            started.run("rms_norm")
        with pytest.raises(OperatorError):
            started.run("double")
        assert started._worker is None


@pytest.mark.parametrize("platform", ["npu", "gpu", ""])
def test_a_platform_that_is_not_there(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    with pytest.raises(PlatformError, match="no CANN" if platform == "npu" else "'cpu' or 'npu'"):
        Executor(platform=platform)


@pytest.mark.parametrize("timeout", [0.0, -1.0, math.inf, math.nan])
def test_a_timeout_is_positive_and_finite(timeout: float) -> None:
    with pytest.raises(KernelError, match="timeout: expected more than 0"):
        Executor(timeout=timeout)


def test_a_tier_is_no_text() -> None:
    with pytest.raises(PlatformError, match=r"tier: expected Tier\.GRAPH or Tier\.PASSES, found 'graph'"):
        Executor(tier="graph")  # type: ignore[arg-type]
