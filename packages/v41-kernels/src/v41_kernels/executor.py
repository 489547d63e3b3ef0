"""Runs operators' kernels on tensors in CPU memory, in one worker process: interpreted, or on an NPU."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from v41_config import CountSpec, OperatorError, OperatorSpec
from v41_kernels.arguments import BoundArguments, bind
from v41_kernels.calculator import calculator_library, default_cache_directory
from v41_kernels.compositions import Call
from v41_kernels.errors import KernelExecutionError, PlatformError
from v41_kernels.pass_report import PassCheck
from v41_kernels.platforms import find_platform
from v41_kernels.pypto_install import find_pypto
from v41_kernels.registry import OPERATORS, STAGES, KernelOperator, find_kernel
from v41_kernels.tiers import Tier
from v41_kernels.worker_process import WorkerProcess, checked_timeout


@dataclass(frozen=True)
class KernelRun:
    """One execution: seconds spent compiling and running, and the checks after passes (`Tier.PASSES` only).

    The tier is None on a device. `launches` are the runs that an operator of several launches consists of.
    """

    operator: str
    tier: Tier | None
    seconds: float
    checks: tuple[PassCheck, ...]
    launches: tuple[KernelRun, ...] = ()


@dataclass(frozen=True)
class Measurement:
    """One launch: its contract and sizes, seconds to compile, operations of the graph, seconds to interpret or run it.

    `cycles` are the cost model's, of a 910B; None where it does not cover the kernel, and on a device.
    """

    spec: OperatorSpec
    dims: Mapping[str, int]
    compile_seconds: float
    operations: int
    run_seconds: float
    cycles: int | None


class Executor:
    """Runs kernels by operator name; destinations are tensors of the caller and are written in place.

    Kernels run one at a time in a worker process, because the compiler tolerates neither threads nor a kernel that
    failed. The worker starts with the first run, a device's at once, and anew after a failure; the first start ever
    also builds PyPTO's interpreter (about 35 s). Several threads may share an executor: they take turns.

    The interpreter keeps what every trip of a loop has computed, some 70 to 100 bytes for each weight that was decoded,
    and beside it a copy of the tensors; so time and memory grow with the square of the rows. A call that needs more
    than half of the machine's memory fails.
    """

    def __init__(
        self,
        *,
        platform: str = "cpu",
        device_id: int = 0,
        tier: Tier | None = None,
        timeout: float = 120.0,
        cache_directory: str | Path | None = None,
        operators: Mapping[str, KernelOperator] | None = None,
    ) -> None:
        """Takes the platform, and the seconds that a kernel may take; `cache_directory` holds the built interpreter.

        `cpu` interprets kernels up to the tier, the tensor graph if none is given. `npu` runs them on the device that
        torch calls `npu:{device_id}`, which takes no tier, and never interprets one instead.

        Errors: `PlatformError` with what is missing, `PyptoInstallError`; `KernelError` for a timeout that is none; on
        `npu` those of the worker's start, too: `CanaryError`, `KernelCrashError`, `KernelTimeoutError`.
        """
        self._pypto = find_pypto()
        self._platform = find_platform(platform, device_id, self._pypto)
        self._tier = None if self._platform.is_device else Tier.GRAPH
        self._tier = self._asked(tier)
        self._timeout = checked_timeout(timeout)
        self._cache_directory = Path(cache_directory or default_cache_directory())
        self._operators = OPERATORS if operators is None else operators
        self._turn = threading.Lock()
        self._worker = self._start_worker() if self._platform.is_device else None

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker and removes its files. A later run starts another one."""
        with self._turn:
            if self._worker is not None:
                self._worker.stop()
                self._worker = None

    @property
    def platform(self) -> str:
        """`cpu`, or a device's name in torch: `npu:0`."""
        return str(self._platform)

    @property
    def tier(self) -> Tier | None:
        """The tier of runs that name none; None on a device."""
        return self._tier

    def run(self, name: str, tier: Tier | None = None, /, **arguments: object) -> KernelRun:
        """Executes an operator: `executor.run("rms_norm", x=x, weight=weight, out=out, num_tokens=3)`.

        Args:
            name: an operator of the registry.
            tier: if not the executor's.
            arguments: the contract's tensors, in CPU memory and contiguous, and scalars. A count that is left out
                means all rows, a constant that of the released model.

        Errors: `OperatorError` before anything is launched; `CalculatorBuildError`, `CanaryError`;
        `KernelExecutionError` or a subclass. Destinations are written only if there is no error.
        """
        operator = find_kernel(name, self._operators)
        bound = self._bound(operator, arguments)
        asked = self._asked(tier)
        if operator.composition is None:
            with self._turn:
                return self._run(operator, bound, asked)
        launches: list[KernelRun] = []

        def launch(stage: KernelOperator, given: Mapping[str, object]) -> None:
            with self._turn:
                launches.append(self._run(stage, self._bound(stage, given), asked))

        self._compose(operator, bound, launch)
        seconds = sum(run.seconds for run in launches)
        checks = tuple(check for run in launches for check in run.checks)
        return KernelRun(operator.spec.name, asked, seconds, checks, tuple(launches))

    def _asked(self, tier: Tier | None) -> Tier | None:
        """The tier to run with. Errors: `PlatformError` if a device is asked for one, or if it is none."""
        if tier is not None and not isinstance(tier, Tier):
            raise PlatformError("tier", tier, "Tier.GRAPH or Tier.PASSES")
        if self._platform.is_device and tier is not None:
            raise PlatformError(f"platform {self._platform}", f"tier {tier.value}", "no tier: a device runs all passes")
        return tier or self._tier

    def _bound(self, operator: KernelOperator, arguments: Mapping[str, object]) -> BoundArguments:
        bound = bind(operator.spec, arguments)
        operator.check(bound)
        return bound

    def _compose(
        self,
        operator: KernelOperator,
        bound: BoundArguments,
        launch: Callable[[KernelOperator, Mapping[str, object]], None],
    ) -> None:
        """Launch after launch on copies of the destinations, which the caller's get when all are done."""
        assert operator.composition is not None
        active = active_rows(bound)
        copies = {name: bound.tensors[name].clone() for name in operator.spec.destinations}
        rows = {
            tensor.name: _first_rows({**bound.tensors, **copies}[tensor.name], tensor.dims[0], active)
            for tensor in operator.spec.tensors
        }

        def launch_by_name(name: str, **arguments: object) -> None:
            launch(STAGES[name] if name in STAGES else find_kernel(name, self._operators), arguments)

        if active:
            operator.composition(Call(launch_by_name, rows, bound.constants))
        clear_inactive_slab(operator.spec, copies, active)
        for name, copy in copies.items():
            bound.tensors[name].copy_(copy)

    def measure(self, name: str, tier: Tier | None = None, /, **arguments: object) -> tuple[Measurement, ...]:
        """Compiles and runs an operator and says what each launch took; destinations are written as by `run`.

        Errors: those of `run`.
        """
        operator, asked = find_kernel(name, self._operators), self._asked(tier)
        launches: list[Measurement] = []

        def measured(launched: KernelOperator, bound: BoundArguments) -> None:
            with self._turn:
                compiled = self._ask(launched, bound, asked, "measure")
                run = self._run(launched, bound, asked)
            run_seconds = compiled["run_seconds"]
            if run_seconds is None:
                run_seconds = max(run.seconds - compiled["compile_seconds"], 0.0)
            launches.append(
                Measurement(
                    launched.spec, bound.dims, compiled["compile_seconds"], compiled["operations"], run_seconds,
                    None if self._platform.is_device else self._cycles(launched, bound),
                )
            )  # fmt: skip

        bound = self._bound(operator, arguments)
        if operator.composition is None:
            measured(operator, bound)
        else:
            self._compose(operator, bound, lambda stage, given: measured(stage, self._bound(stage, given)))
        return tuple(launches)

    def _cycles(self, operator: KernelOperator, bound: BoundArguments) -> int | None:
        """Cycles by the cost model of a 910B; None where it does not cover the kernel, which can end the worker."""
        try:
            with self._turn:
                cycles: int = self._ask(operator, bound, Tier.PASSES, "simulate")["cycles"]
        except KernelExecutionError:
            return None
        return cycles

    def _run(self, operator: KernelOperator, bound: BoundArguments, tier: Tier | None) -> KernelRun:
        answer = self._ask(operator, bound, tier, "run")
        checks = tuple(PassCheck(pass_name, compared) for pass_name, compared in answer["checks"])
        return KernelRun(operator.spec.name, tier, answer["seconds"], checks)

    def _start_worker(self) -> WorkerProcess:
        if self._platform.is_device:
            return WorkerProcess(self._platform, None)
        return WorkerProcess(self._platform, calculator_library(self._pypto, self._cache_directory))

    def _ask(self, operator: KernelOperator, bound: BoundArguments, tier: Tier | None, task: str) -> dict[str, Any]:
        if self._worker is None:
            self._worker = self._start_worker()
        where = f"kernel {operator.spec.name} ({self._platform if tier is None else f'tier {tier.value}'})"
        with tempfile.TemporaryDirectory(dir=self._worker.scratch, ignore_cleanup_errors=True) as directory:
            request = _request(operator, bound, tier, where, Path(directory)) | {"task": task}
            try:
                answer = self._worker.ask(where, request, self._timeout)
            except BaseException:
                self._worker = None  # `ask` has stopped it
                raise
            if task == "run":
                _receive(request["tensors"], operator, bound)
        return answer


def active_rows(bound: BoundArguments) -> int:
    """Rows in use of an operator that is several launches.

    Errors: `OperatorError` if the operands are a rank's share: its transports are no kernels.
    """
    for share, whole in (("T_local", "T"), ("E_local", "E")):
        held, total = bound.dims.get(share), bound.dims.get(whole)
        if held is not None and total is not None and held != total:
            raise OperatorError(f"{bound.spec.name}: {share}", held, f"{whole} = {total}, a group of one rank")
    return bound.counts["num_tokens"]


def _first_rows(tensor: Tensor, dim: int | str, active: int) -> Tensor:
    return tensor[:active] if dim in ("T", "T_local") else tensor


def clear_inactive_slab(spec: OperatorSpec, copies: Mapping[str, Tensor], active: int) -> None:
    """Inactive rows of a token slab are zero where one count holds for the whole group."""
    counted = {scalar.limit for scalar in spec.scalars if isinstance(scalar, CountSpec)}
    for tensor in spec.tensors:
        if tensor.direction == "out" and tensor.dims[0] == "T_local" and "T_local" not in counted:
            copies[tensor.name][active:].zero_()


def _request(
    operator: KernelOperator, bound: BoundArguments, tier: Tier | None, where: str, directory: Path
) -> dict[str, Any]:
    """Writes the tensors into files in `directory`, and describes the call in the kernel's names."""
    in_kernel = {contract: kernel for kernel, contract in operator.names.items()}
    tensors = []
    for name, tensor in bound.tensors.items():
        written = name in operator.spec.destinations
        tensors.append(_send(in_kernel.get(name, name), tensor, written, directory))
    for name, value in bound.counts.items():
        tensors.append(_send(in_kernel.get(name, name), torch.tensor([value], dtype=torch.int32), False, directory))
    static = bound.static_dims | dict(bound.constants) | operator.sizes(bound)
    return {
        "where": where,
        "kernel": operator.kernel,
        "static": {in_kernel.get(name, name): value for name, value in static.items()},
        "tier": None if tier is None else tier.value,
        "tolerance": [operator.pass_tolerance.relative, operator.pass_tolerance.absolute],
        "tensors": tensors,
    }


def _send(name: str, tensor: Tensor, written: bool, directory: Path) -> dict[str, Any]:
    file = directory / f"{name}.tensor"
    raw = _bytes(tensor).numpy()
    raw.tofile(file)
    return {"name": name, "bytes": raw.nbytes, "written": written, "file": str(file)}


def _receive(sent: list[dict[str, Any]], operator: KernelOperator, bound: BoundArguments) -> None:
    """Takes the destinations' new values from their files, all of them or none."""
    values = {
        operator.names.get(tensor["name"], tensor["name"]): np.fromfile(tensor["file"], dtype=np.uint8)
        for tensor in sent
        if tensor["written"]
    }
    for name, value in values.items():
        _bytes(bound.tensors[name]).copy_(torch.from_numpy(value))


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as UINT8 `[bytes]`.

    Its strides are set, since a dimension of size one may have any, 0 after `expand`.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
