"""Two devices that interpret.

Tensors that are moved to a device are copies that name it as theirs. Where pypto hands a kernel to its C++ launch, the
kernel is interpreted on them, so values are the interpreter's. `log.jsonl` in the directory `STAND_IN_NPU` says what
was launched, and how; a file `fault` there asks for a fault, of every launch but the canary's, or of one kernel's:
`crash`, or `crash rms_norm`.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STREAM = 4711
_DIRECTORY = Path(os.environ["STAND_IN_NPU"])
_ASCEND_HOME = os.environ["ASCEND_HOME_PATH"]
_pending: list[str] = []
_current = 0
_pass_through = Tensor.to


class NpuTensor(Tensor):
    """A tensor that says it is on the current device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("npu", _current)

    def cpu(self) -> Tensor:  # type: ignore[override]
        assert not _pending, "read before the stream was waited for"
        return self.as_subclass(Tensor).clone()


def _to(tensor: Tensor, *arguments: Any, **named: Any) -> Tensor:
    if arguments and isinstance(arguments[0], torch.device) and arguments[0].type == "npu":
        assert arguments[0] == torch.device("npu", _current), f"{arguments[0]} while {_current} is current"
        return tensor.clone().as_subclass(NpuTensor)
    return _pass_through(tensor, *arguments, **named)


def _fault(module: str) -> str:
    """The fault that a launch of this kernel is to have."""
    file = _DIRECTORY / "fault"
    kind, _, kernel = (file.read_text() if file.is_file() else "").partition(" ")
    name = module.rpartition(".")[2]
    return "" if name == "canary" or kernel not in ("", name) else kind


@functools.cache
def _interpreter() -> Any:
    from v41_kernels.calculator import calculator_library, default_cache_directory
    from v41_kernels.interpreter import Interpreter
    from v41_kernels.pypto_install import find_pypto

    library = calculator_library(find_pypto(), default_cache_directory())
    interpreter = Interpreter(library, Path(tempfile.mkdtemp(dir=os.environ["HOME"])))
    interpreter.hand_over_tensors()
    return interpreter


def _destinations(kernel: str) -> tuple[str, ...]:
    from v41_kernels.registry import OPERATORS, STAGES

    for operator in (*OPERATORS.values(), *STAGES.values()):
        if operator.kernel == kernel:
            names = {contract: own for own, contract in operator.names.items()}
            return tuple(names.get(name, name) for name in operator.spec.destinations)
    return ("out",)


@functools.cache
def _compile(kernel_module: object) -> None:
    """What a compilation leaves: a graph, here of one operation."""
    del kernel_module
    directory = Path(tempfile.mkdtemp(prefix="output_", dir=_made(os.environ["TILE_FWK_OUTPUT_DIR"])))
    graph = {"functions": [{"operations": [{"opcode": "STAND_IN"}]}]}
    (directory / "program.json").write_text(json.dumps(graph))


def _made(directory: str) -> str:
    os.makedirs(directory, exist_ok=True)
    return directory


def _launch(wrapper: Any, stream: int, tensors: list[Tensor], definitions: list[Any]) -> None:
    """`pypto_impl.LaunchKernelTorch(wrapper, stream, tensors, definitions)` of pypto 0.2.0."""
    entry = wrapper._original_func
    record = {
        "kernel": entry.__module__,
        "entry": entry.__qualname__,
        "run_mode": wrapper._runtime_options["run_mode"],
        "verify_options": wrapper._verify_options,
        "compile_stage": int(wrapper._host_options["compile_stage"]),
        "module": id(wrapper.kmodule),
        "stream": stream,
        "devices": [str(tensor.device) for tensor in tensors],
        "parameters": [definition.name for definition in definitions],
        "ascend_home": _ASCEND_HOME,
    }
    with open(_DIRECTORY / "log.jsonl", "a", encoding="utf-8") as log:
        log.write(json.dumps(record) + "\n")
    _compile(wrapper.kmodule)
    names = entry.__code__.co_varnames[: entry.__code__.co_argcount]
    memory = {name: tensor.as_subclass(Tensor) for name, tensor in zip(names, tensors, strict=True)}
    written = _destinations(entry.__module__)
    _interpreter().run("stand-in", entry, memory, written, None)
    _pending.append(entry.__module__)
    fault = _fault(entry.__module__)
    if fault == "wrong":
        for name in written:
            memory[name].view(torch.uint8).bitwise_not_()
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)


def _synchronize() -> None:
    faults = [_fault(module) for module in _pending]
    _pending.clear()
    if "synchronize" in faults:
        raise RuntimeError("stand-in: the device reports an error")


def _set_device(device_id: int) -> None:
    global _current  # noqa: PLW0603
    _current = device_id


class Event:
    """The n-th pair of events is n milliseconds apart."""

    _pairs = itertools.count(1)

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        del end
        return float(next(self._pairs))


class _Stream:
    npu_stream = STREAM


INTERFACE: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "device_count": lambda: 2,
    "set_device": _set_device,
    "current_device": lambda: _current,
    "current_stream": _Stream,
    "synchronize": _synchronize,
    "Event": Event,
}


def install() -> None:
    """Puts the launch and the moves in place."""
    Tensor.to = _to  # type: ignore[method-assign,assignment]
    importlib.import_module("pypto").pypto_impl.LaunchKernelTorch = _launch
