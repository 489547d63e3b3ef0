"""The process that runs kernels: `python -m v41_kernels.worker`, started by `worker_process` and by nothing else.

How it is asked and answers is in `request_loop`.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from v41_kernels.backend import Backend
from v41_kernels.canary import check_canary
from v41_kernels.device import Device
from v41_kernels.errors import KernelExecutionError
from v41_kernels.interpreter import Interpreter
from v41_kernels.request_loop import Answer, Request, kernel_entry, serve
from v41_kernels.tiers import Tier

TORCH_DTYPES = {
    "DT_BF16": torch.bfloat16,
    "DT_FP32": torch.float32,
    "DT_INT8": torch.int8,
    "DT_INT32": torch.int32,
    "DT_BOOL": torch.bool,
}
"""Element types of entries' parameters. Codes of the low-bit formats are INT8, an INT64 is a pair of INT32."""


def main() -> int:
    """Serves requests until standard input ends; the exit status is 1 after a failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--calculator", type=Path, help="the built interpreter library")
    where.add_argument("--device-id", type=int, help="the NPU to run on, instead of interpreting")
    parser.add_argument("--scratch", type=Path, required=True, help="directory for everything that pypto writes")
    parser.add_argument("--replies", type=int, required=True, help="file descriptor for the answers")
    options = parser.parse_args()
    return serve(options.replies, options.scratch, lambda: _executing(options))


def _executing(options: argparse.Namespace) -> Callable[[Request], Answer]:
    backend = _backend(options.calculator, options.device_id, options.scratch)
    check_canary(backend)
    return lambda request: _execute(backend, request)


def _backend(calculator: Path | None, device_id: int, scratch: Path) -> Backend:
    if calculator is None:
        return Device(device_id, scratch)
    _limit_memory()
    interpreter = Interpreter(calculator, scratch)
    interpreter.hand_over_tensors()
    return interpreter


def _limit_memory() -> None:
    """Half of the machine's memory: the interpreter keeps copies per tile, and too large a call should fail by itself
    before the system picks a process to kill."""
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _execute(backend: Backend, request: Request) -> Answer:
    started = time.perf_counter()
    entry = kernel_entry(request["kernel"], tuple(request["static"].items()))
    tensors = {
        tensor["name"]: _map(request["where"], tensor, entry.__annotations__[tensor["name"]])
        for tensor in request["tensors"]
    }
    tier = None if request["tier"] is None else Tier(request["tier"])
    if request["task"] == "measure":
        return backend.measure(request["where"], entry, tensors, tier)._asdict()
    if request["task"] == "simulate":
        assert isinstance(backend, Interpreter), "the cost model is no device's"
        return {"cycles": backend.simulate(request["where"], entry, tensors)}
    destinations = [tensor["name"] for tensor in request["tensors"] if tensor["written"]]
    checks = backend.run(request["where"], entry, tensors, destinations, tier, request["tolerance"])
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "checks": [[check.pass_name, check.compared] for check in checks]}


def _map(where: str, tensor: dict[str, Any], declared: Any) -> Tensor:
    """The bytes in a file as the entry's parameter declares them: its dtype, and its shape with the first size open.

    A destination's changes go to the file, an argument's stay in this process.
    """
    dtype = TORCH_DTYPES[declared.dtype.name]
    sizes = [size if isinstance(size, int) else None for size in declared.shape]
    fixed = math.prod(size for size in sizes if size is not None)
    rows, rest = divmod(tensor["bytes"], fixed * dtype.itemsize)
    if rest or (None not in sizes and rows != 1):
        expected = f"a parameter that holds {tensor['bytes']} bytes"
        raise KernelExecutionError(f"{where}: {tensor['name']}", f"{dtype} {declared.shape}", expected)
    shape = [rows if size is None else size for size in sizes]
    if tensor["bytes"] == 0:
        return torch.empty(shape, dtype=dtype)
    mapped = torch.from_file(tensor["file"], shared=tensor["written"], size=tensor["bytes"], dtype=torch.uint8)
    return mapped.view(dtype).view(shape)


if __name__ == "__main__":
    sys.exit(main())
