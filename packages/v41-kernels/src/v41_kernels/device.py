"""PyPTO inside the worker process on an NPU: the entries that the interpreter runs, compiled to the end and launched.

pypto's own way is taken, unchanged: `RunMode.NPU` and torch tensors that are on the device. Nothing of this was ever
run on one.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from v41_kernels.backend import Measured
from v41_kernels.compiler_session import CompilerSession, graph_operations, parameters
from v41_kernels.errors import PlatformError
from v41_kernels.pass_report import PassCheck
from v41_kernels.tiers import Tier

_EXPECTED = "a kernel that compiles and runs on the device"
_WARM_UP = 3
_REPEATS = 20


def open_device(device_id: int) -> Any:
    """torch's interface to NPUs, `torch.npu`, with that device current.

    Errors: `PlatformError` for the first thing that is missing, with what to do about it.
    """
    where = f"platform 'npu', device {device_id}"
    try:
        importlib.import_module("torch_npu")
    except Exception as error:  # a library of CANN that is missing, another torch: its own message says which
        expected = "the version made for this torch and CANN, and CANN's set_env.sh sourced"
        raise PlatformError(where, f"torch_npu cannot be imported: {error}", expected) from error
    npu: Any = torch.npu  # type: ignore[attr-defined]
    if not npu.is_available():
        expected = "a driver and a device that `npu-smi info` shows, and that ASCEND_RT_VISIBLE_DEVICES does not hide"
        raise PlatformError(where, "torch.npu.is_available() is False", expected)
    count = npu.device_count()
    if not 0 <= device_id < count:
        raise PlatformError("device id", device_id, f"0 to {count - 1}: torch_npu finds {count}")
    try:
        npu.set_device(device_id)
    except Exception as error:
        raise PlatformError(where, f"torch_npu cannot use it: {error}", "a device that no other work holds") from error
    return npu


class Device:
    """Executes jit entries on one NPU. Not thread-safe, and of no use any more once a kernel has failed."""

    def __init__(self, device_id: int, scratch: Path) -> None:
        """Opens the device and loads pypto with its device runtime. `scratch` takes all files that pypto writes.

        Errors: `PlatformError`, `PyptoInstallError`.
        """
        self._npu = open_device(device_id)
        try:
            self._session = CompilerSession(scratch)
        except OSError as error:
            expected = "libraries of CANN that pypto's device runtime finds: source CANN's set_env.sh"
            raise PlatformError("platform 'npu', import pypto", str(error), expected) from error
        self._device = torch.device("npu", device_id)
        # Compiled entries stay: another call of the same sizes only launches. What pypto wrote for them stays as well,
        # in the directory that the process was given.
        self._compiled: dict[Callable[..., None], Any] = {}

    def run(
        self,
        where: str,
        entry: Callable[..., None],
        tensors: Mapping[str, Tensor],
        destinations: Sequence[str],
        tier: Tier | None,
        tolerance: Sequence[float] = (0.0, 0.0),
    ) -> tuple[PassCheck, ...]:
        """Executes `entry` on copies of `tensors` on the device; `destinations` are written when it is done.

        There are no checks after passes. Errors: `KernelExecutionError`.
        """
        del tier, tolerance
        with self._session.failures(where, _EXPECTED):
            on_device = self._moved(entry, tensors)
            if entry in self._compiled:
                self._compiled[entry](*on_device.values())
            else:
                self._compiled[entry] = self._compile(entry, on_device)
            self._npu.synchronize()
            results = {name: on_device[name].cpu() for name in destinations}
        for name, result in results.items():
            tensors[name].copy_(result)
        return ()

    def measure(
        self, where: str, entry: Callable[..., None], tensors: Mapping[str, Tensor], tier: Tier | None
    ) -> Measured:
        """Compiles `entry` anew; the seconds of a run are the median of some, after others, between two events of the
        stream: a host that launches slowly is in them.

        Errors: `KernelExecutionError`.
        """
        del tier
        with self._session.output_directory() as output:
            with self._session.failures(where, _EXPECTED):
                on_device = self._moved(entry, tensors)
                started = time.perf_counter()
                compiled = self._compile(entry, on_device)
                self._npu.synchronize()
                first = time.perf_counter() - started
                runs = [self._timed(compiled, on_device) for _ in range(_WARM_UP + _REPEATS)]
            median = statistics.median(runs[_WARM_UP:])
            return Measured(max(first - median, 0.0), graph_operations(where, output).total(), median)

    def _moved(self, entry: Callable[..., None], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the device, in the order of the entry's parameters."""
        return {name: tensors[name].to(self._device) for name in parameters(entry)}

    def _compile(self, entry: Callable[..., None], on_device: Mapping[str, Tensor]) -> Any:
        """Compiles and runs the entry for the first time; what comes back only runs."""
        compiled = self._session.compiled(entry, runtime_options={"run_mode": self._session.pypto.RunMode.NPU})
        compiled(*on_device.values())
        # pypto would compile it again, or look for it in a cache by the addresses of functions, which may be those of
        # a dead one.
        compiled._get_or_create_kmodule = _keep_module
        return compiled

    def _timed(self, compiled: Any, on_device: Mapping[str, Tensor]) -> float:
        """Seconds of one run."""
        start, end = (self._npu.Event(enable_timing=True) for _ in range(2))
        start.record()
        compiled(*on_device.values())
        end.record()
        self._npu.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3


def _keep_module(non_tensor_values: object) -> None:
    """What a compiled entry does at its next call instead of compiling: nothing. Entries have only tensors."""
    del non_tensor_values
