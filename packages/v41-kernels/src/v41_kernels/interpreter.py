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
import importlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from v41_kernels.backend import Measured
from v41_kernels.canary import check_canary
from v41_kernels.compiler_session import CompilerSession, graph_operations, parameters, the_only_file
from v41_kernels.errors import KernelExecutionError
from v41_kernels.pass_report import PassCheck, read_pass_report
from v41_kernels.tiers import CHECKED_PASSES, Tier

_MUCH_MEMORY = 1 << 28
"""Bytes that the verifier may keep from one launch to the next."""


class Interpreter:
    """Executes jit entries on CPU tensors. Not thread-safe, and of no use any more once a kernel has failed."""

    def __init__(self, calculator: Path, scratch: Path) -> None:
        """Loads pypto and the built calculator. `scratch` takes all files that pypto writes.

        Errors: `PyptoInstallError`.
        """
        self._session = CompilerSession(scratch)
        self._pypto = self._session.pypto
        self._jit_module: Any = importlib.import_module("pypto.frontend.parser.entry")
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
        tensors: Mapping[str, Tensor],
        destinations: Sequence[str],
        tier: Tier | None,
        tolerance: Sequence[float] = (0.0, 0.0),
    ) -> tuple[PassCheck, ...]:
        """Compiles and executes `entry` on `tensors` (by parameter name), writing `destinations` in place.

        Gives the checks made after passes (none in the graph tier). Errors: `PassVerificationError`;
        `KernelExecutionError` if pypto raises anything or values are missing.
        """
        with self._session.output_directory() as output:
            before = _memory_in_use()
            with self._session.failures(where, "a kernel that compiles and runs"):
                self._compile(entry, tensors, destinations, tier, tolerance)
            kept = _memory_in_use() - before
            verified = the_only_file(where, f"{output}/output_*/verify_*")
            order = parameters(entry)
            for name in destinations:
                self._read_back(where, verified, order.index(name), tensors[name])
            if tier is Tier.PASSES or kept > _MUCH_MEMORY:
                self._close()
            return read_pass_report(where, verified) if tier is Tier.PASSES else ()

    def measure(
        self, where: str, entry: Callable[..., None], tensors: Mapping[str, Tensor], tier: Tier | None
    ) -> Measured:
        """Compiles `entry` without interpreting it. Errors: `KernelExecutionError`."""
        with self._session.output_directory() as output:
            started = time.perf_counter()
            self._only_compile(where, entry, tensors, self._stage(tier))
            return Measured(time.perf_counter() - started, graph_operations(where, output).total(), None)

    def simulate(self, where: str, entry: Callable[..., None], tensors: Mapping[str, Tensor]) -> int:
        """Cycles of the whole kernel by pypto's cost model of a 910B, which knows nothing of values.

        Errors: `KernelExecutionError` where it does not know an operation; it may also end the process.
        """
        wrapper = self._jit_module.JitCallableWrapper
        wrapper._run_with_cpu = self._simulate
        try:
            with self._session.output_directory() as output:
                self._only_compile(where, entry, tensors, None)
                simulated = f"{output}/output_*/CostModelSimulationOutput"
                report = the_only_file(where, f"{simulated}/*stat.report.txt").read_text()
        finally:
            wrapper._run_with_cpu = self._run_nothing
        found = re.search(r"Total Cycles\.*: *(\d+)", report)
        if found is None:
            raise KernelExecutionError(where, "no total", "a report of the cost model with its cycles")
        return int(found.group(1))

    def _only_compile(self, where: str, entry: Callable[..., None], tensors: Mapping[str, Tensor], stage: Any) -> None:
        """`stage` None compiles to the end, so that the cost model has something to run."""
        options = {} if stage is None else {"host_options": {"compile_stage": stage}}
        with self._session.failures(where, "a kernel that compiles"):
            compiled = self._session.compiled(entry, runtime_options={"run_mode": self._pypto.RunMode.SIM}, **options)
            compiled(*(tensors[name] for name in parameters(entry)))

    def _compile(
        self,
        entry: Callable[..., None],
        tensors: Mapping[str, Tensor],
        destinations: Sequence[str],
        tier: Tier | None,
        tolerance: Sequence[float],
    ) -> None:
        """The verifier interprets the kernel while it is compiled; there is no other run."""
        compiled = self._session.compiled(
            entry,
            runtime_options={"run_mode": self._pypto.RunMode.SIM},
            verify_options={
                "enable_pass_verify": True,
                "pass_verify_pass_filter": list(CHECKED_PASSES) if tier is Tier.PASSES else [],
                "pass_verify_error_tol": list(tolerance),  # relative, absolute
            },
            host_options={"compile_stage": self._stage(tier)},
        )
        # The verifier writes down the values of those tensors for which it has something to compare them with.
        stand_ins = [torch.zeros_like(tensors[name]) if name in destinations else None for name in parameters(entry)]
        self._pypto.set_verify_golden_data(goldens=stand_ins)
        compiled(*(tensors[name] for name in parameters(entry)))

    def _stage(self, tier: Tier | None) -> Any:
        stages = self._pypto.CompStage
        return stages.CODEGEN_INSTRUCTION if tier is Tier.PASSES else stages.TENSOR_GRAPH

    def _read_back(self, where: str, verified: Path, index: int, destination: Tensor) -> None:
        """Copies the verifier's values of parameter `index` over `destination`."""
        if destination.numel() == 0:
            return
        # Beside them lies the stand-in, as tensor_graph~{index}~golden~{time}.data.
        values = the_only_file(where, f"{verified}/tensor_graph/tensor_graph~{index}~[0-9]*.data")
        raw = np.fromfile(values, dtype=np.uint8)
        if raw.nbytes != destination.numel() * destination.element_size():
            expected = f"{destination.numel()} elements of {destination.dtype}"
            raise KernelExecutionError(where, f"{raw.nbytes} bytes in {values.name}", expected)
        destination.copy_(torch.from_numpy(raw).view(destination.dtype).view(destination.shape))

    def _close(self) -> None:
        """The verifier completes its report, and lets go of what it has interpreted, with the next compilation."""
        check_canary(self)


def _memory_in_use() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
