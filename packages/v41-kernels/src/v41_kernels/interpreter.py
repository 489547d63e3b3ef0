"""PyPTO inside the worker process: loaded without side effects, and made to run a kernel on a CPU.

Without CANN the stock package cannot execute a kernel and says nothing about it: its verifier copies the arguments
through an empty function, interprets the kernel on zeros, and leaves the destinations as they were. Three things are
changed, for exactly the version that `pypto_install` accepts:

* the verifier is given the caller's tensors;
* its cost model, which stands in for the device, is not started;
* the destinations are filled from the values that the verifier writes down.
"""

from __future__ import annotations

import ctypes
import glob
import importlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from v41_kernels.canary import check_canary
from v41_kernels.errors import KernelExecutionError
from v41_kernels.pass_report import PassCheck, read_pass_report
from v41_kernels.pypto_install import find_pypto
from v41_kernels.tiers import CHECKED_PASSES, Tier

_OUTPUT_VARIABLE = "TILE_FWK_OUTPUT_DIR"  # read by the C++ core at the start of every compilation


class Interpreter:
    """Executes jit entries on CPU tensors. Not thread-safe, and of no use any more once a kernel has failed."""

    def __init__(self, calculator: Path, scratch: Path) -> None:
        """Loads pypto and the built calculator. `scratch` takes all files that pypto writes.

        Errors: `PyptoInstallError`.
        """
        find_pypto()
        with contained_import():
            self._pypto: Any = importlib.import_module("pypto")
        self._jit_module: Any = importlib.import_module("pypto.frontend.parser.entry")
        self._scratch = scratch
        ctypes.CDLL(str(calculator), mode=ctypes.RTLD_GLOBAL)
        importlib.import_module("pypto._utils").BuildOnlineManager().calculator_loaded = True

    def hand_over_tensors(self) -> None:
        """Makes the verifier work on the caller's tensors, and skips the cost model."""
        jit_module, pypto = self._jit_module, self._pypto

        def set_up_verify_data(pto_tensors: Sequence[Any]) -> None:
            if pypto.get_verify_options().get("enable_pass_verify"):
                stand_ins = jit_module._pto_verify_datas.get_data()
                pypto.pypto_impl.SetVerifyData(jit_module._pto_to_tensor_data(pto_tensors), [], stand_ins)

        def run_nothing(wrapper: object, inputs: object, outputs: object) -> None:
            del wrapper, inputs, outputs

        self._simulate = jit_module.JitCallableWrapper._run_with_cpu
        self._run_nothing = run_nothing
        jit_module.JitCallableWrapper._setup_verify_data = staticmethod(set_up_verify_data)
        jit_module.JitCallableWrapper._run_with_cpu = run_nothing

    def run(
        self,
        where: str,
        entry: Callable[..., None],
        tensors: dict[str, Tensor],
        destinations: Sequence[str],
        tier: Tier,
        tolerance: Sequence[float] = (0.0, 0.0),
    ) -> tuple[PassCheck, ...]:
        """Compiles and executes `entry` on `tensors` (by parameter name), writing `destinations` in place.

        Gives the checks made after passes (none in the graph tier). Errors: `PassVerificationError`;
        `KernelExecutionError` if pypto raises anything or values are missing.
        """
        with self._output_directory() as output:
            logged = self._log_sizes()
            try:
                self._compile(entry, tensors, destinations, tier, tolerance)
            except Exception as error:
                found = self._first_logged_error(logged) or _without_frames(error)
                raise KernelExecutionError(where, found, "a kernel that compiles and runs") from error
            verified = self._only(where, f"{output}/output_*/verify_*")
            order = _parameters(entry)
            for name in destinations:
                self._read_back(where, verified, order.index(name), tensors[name])
            if tier is Tier.GRAPH:
                return ()
            self._close_reports()
            return read_pass_report(where, verified)

    def measure(
        self, where: str, entry: Callable[..., None], tensors: dict[str, Tensor], tier: Tier
    ) -> tuple[float, int]:
        """Seconds to compile `entry` without interpreting it, and the operations of the graph that comes out.

        Errors: `KernelExecutionError`.
        """
        with self._output_directory() as output:
            started = time.perf_counter()
            self._only_compile(where, entry, tensors, _stage(self._pypto, tier))
            seconds = time.perf_counter() - started
            program = json.loads(self._only(where, f"{output}/output_*/program.json").read_text())
            return seconds, sum(len(function["operations"]) for function in program["functions"])

    def simulate(self, where: str, entry: Callable[..., None], tensors: dict[str, Tensor]) -> int:
        """Cycles of the whole kernel by pypto's cost model of a 910B, which knows nothing of values.

        Errors: `KernelExecutionError` where it does not know an operation; it may also end the process.
        """
        wrapper = self._jit_module.JitCallableWrapper
        wrapper._run_with_cpu = self._simulate
        try:
            with self._output_directory() as output:
                self._only_compile(where, entry, tensors, None)
                report = self._only(where, f"{output}/output_*/CostModelSimulationOutput/*stat.report.txt").read_text()
        finally:
            wrapper._run_with_cpu = self._run_nothing
        found = re.search(r"Total Cycles\.*: *(\d+)", report)
        if found is None:
            raise KernelExecutionError(where, "no total", "a report of the cost model with its cycles")
        return int(found.group(1))

    def _only_compile(self, where: str, entry: Callable[..., None], tensors: dict[str, Tensor], stage: Any) -> None:
        """`stage` None compiles to the end, so that the cost model has something to run."""
        pypto = self._pypto
        options = {} if stage is None else {"host_options": {"compile_stage": stage}}
        logged = self._log_sizes()
        try:
            compiled = _wrap(
                pypto.frontend.jit(runtime_options={"run_mode": pypto.RunMode.SIM}, use_cache=False, **options), entry
            )
            compiled(*(tensors[name] for name in _parameters(entry)))
        except Exception as error:
            found = self._first_logged_error(logged) or _without_frames(error)
            raise KernelExecutionError(where, found, "a kernel that compiles") from error

    def _compile(
        self,
        entry: Callable[..., None],
        tensors: dict[str, Tensor],
        destinations: Sequence[str],
        tier: Tier,
        tolerance: Sequence[float],
    ) -> None:
        """The verifier interprets the kernel while it is compiled; there is no other run."""
        pypto = self._pypto
        passes = list(CHECKED_PASSES) if tier is Tier.PASSES else []
        stage = _stage(pypto, tier)
        compiled = _wrap(
            pypto.frontend.jit(
                runtime_options={"run_mode": pypto.RunMode.SIM},
                verify_options={
                    "enable_pass_verify": True,
                    "pass_verify_pass_filter": passes,
                    "pass_verify_error_tol": list(tolerance),  # relative, absolute
                },
                host_options={"compile_stage": stage},
                use_cache=False,
            ),
            entry,
        )
        # The verifier writes down the values of those tensors for which it has something to compare them with.
        stand_ins = [torch.zeros_like(tensors[name]) if name in destinations else None for name in _parameters(entry)]
        pypto.set_verify_golden_data(goldens=stand_ins)
        compiled(*(tensors[name] for name in _parameters(entry)))

    def _read_back(self, where: str, verified: Path, index: int, destination: Tensor) -> None:
        """Copies the verifier's values of parameter `index` over `destination`."""
        if destination.numel() == 0:
            return
        # Beside them lies the stand-in, as tensor_graph~{index}~golden~{time}.data.
        values = self._only(where, f"{verified}/tensor_graph/tensor_graph~{index}~[0-9]*.data")
        raw = np.fromfile(values, dtype=np.uint8)
        if raw.nbytes != destination.numel() * destination.element_size():
            expected = f"{destination.numel()} elements of {destination.dtype}"
            raise KernelExecutionError(where, f"{raw.nbytes} bytes in {values.name}", expected)
        destination.copy_(torch.from_numpy(raw).view(destination.dtype).view(destination.shape))

    def _close_reports(self) -> None:
        """The verifier closes (and so completes) its report when the next compilation opens another one."""
        check_canary(self)

    @contextmanager
    def _output_directory(self) -> Iterator[Path]:
        """A directory of its own for what one compilation writes, removed afterwards."""
        before = os.environ.get(_OUTPUT_VARIABLE)
        directory = Path(tempfile.mkdtemp(prefix="run-", dir=self._scratch))
        os.environ[_OUTPUT_VARIABLE] = str(directory)
        try:
            yield directory
        finally:
            if before is None:
                del os.environ[_OUTPUT_VARIABLE]
            else:
                os.environ[_OUTPUT_VARIABLE] = before
            shutil.rmtree(directory, ignore_errors=True)

    def _log_sizes(self) -> dict[Path, int]:
        return {log: log.stat().st_size for log in self._scratch.rglob("pypto-log-*.log")}

    def _first_logged_error(self, before: dict[Path, int]) -> str | None:
        """What the compiler logged first since `before`: the cause, where its exception names a consequence."""
        for log in self._log_sizes():
            with open(log, encoding="utf-8", errors="replace") as file:
                file.seek(before.get(log, 0))
                for line in file:
                    # [ERROR] PYPTO(1):2026-11-30 03:10:48 [schedule_base.h:358][PASS]:the message; the verifier logs as
                    # an error, too, that values differ from the stand-ins.
                    if "[ERROR]" in line and "[VERIFY]" not in line:
                        return line.split("]:", 1)[-1].strip()
        return None

    @staticmethod
    def _only(where: str, pattern: str) -> Path:
        found = glob.glob(pattern)
        if len(found) != 1:
            raise KernelExecutionError(where, f"{len(found)} of {Path(pattern).name}", "one, written by the verifier")
        return Path(found[0])


@contextmanager
def contained_import() -> Iterator[None]:
    """Undoes what importing pypto does to the process: a root log handler at DEBUG level, a changed `os.environ`."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    environ, variables = os.environ, dict(os.environ)
    try:
        yield
    finally:
        root.setLevel(level)
        for handler in [handler for handler in root.handlers if handler not in handlers]:
            root.removeHandler(handler)
        os.environ = environ  # noqa: B003 - pypto replaces the object, we put the old one back
        if dict(environ) != variables:
            environ.clear()
            environ.update(variables)


def _stage(pypto: Any, tier: Tier) -> Any:
    return pypto.CompStage.TENSOR_GRAPH if tier is Tier.GRAPH else pypto.CompStage.CODEGEN_INSTRUCTION


def _parameters(entry: Callable[..., None]) -> tuple[str, ...]:
    code = entry.__code__
    return code.co_varnames[: code.co_argcount]


def _without_frames(error: Exception) -> str:
    """The message of a pypto exception without the pages of C++ frames behind it."""
    reason = re.split(r"lib\w+(?:\.so)?\(", str(error), maxsplit=1)[0]
    return f"{type(error).__name__}: {' '.join(reason.split())}"


def _wrap(jit: Callable[[Callable[..., None]], Callable[..., None]], entry: Callable[..., None]) -> Callable[..., None]:
    """Applies the decorator where no other name is in reach: pypto lets the local variables of the function that
    applies it shadow the kernel's own globals."""
    return jit(entry)
