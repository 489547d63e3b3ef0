"""The process that compiles kernels and runs none: `python -m v41_kernels.compile_worker`, started as `worker` is.

It imports the pypto that comes first on its path. A request names a kernel and its sizes; there are no tensors in it
and none in the answer, and entries are compiled with zeros in place of them.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from v41_kernels.compiler_session import CompilerSession, graph_operations, parameters
from v41_kernels.request_loop import Answer, Request, kernel_entry, serve
from v41_kernels.worker import TORCH_DTYPES

_DTYPES = {
    **TORCH_DTYPES,
    "DT_FP8E4M3": torch.float8_e4m3fn,
    "DT_FP8E8M0": torch.float8_e8m0fnu,
    "DT_FP4_E2M1X2": torch.uint8,
}
"""Of the entries' parameters; the low-bit ones are declared as such here, since nothing casts them."""


def main() -> int:
    """Serves requests until standard input ends; the exit status is 1 after a failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", type=Path, required=True, help="directory for everything that pypto writes")
    parser.add_argument("--replies", type=int, required=True, help="file descriptor for the answers")
    options = parser.parse_args()
    return serve(options.replies, options.scratch, lambda: _compiling(options.scratch))


def _compiling(scratch: Path) -> Callable[[Request], Answer]:
    session = CompilerSession(scratch)
    wrapper = importlib.import_module("pypto.frontend.parser.entry").JitCallableWrapper
    wrapper._run_with_cpu = lambda self, inputs, outputs: None  # the cost model, which stands in for a device
    return lambda request: _compile(session, request)


def _compile(session: CompilerSession, request: Request) -> Answer:
    """All passes up to generated instructions, for the architecture that this pypto compiles for."""
    pypto, where = session.pypto, request["where"]
    entry = kernel_entry(request["kernel"], tuple(request["static"].items()))
    started = time.perf_counter()
    with session.output_directory() as output, session.failures(where, "a kernel that compiles"):
        compiled = session.compiled(
            entry,
            runtime_options={"run_mode": pypto.RunMode.SIM},
            host_options={"compile_stage": pypto.CompStage.CODEGEN_INSTRUCTION},
        )
        compiled(*(_zeros(entry.__annotations__[name]) for name in parameters(entry)))
        seconds = time.perf_counter() - started
        return {
            "seconds": seconds,
            "operations": graph_operations(where, output),
            "architecture": str(pypto.platform.npuarch),
        }


def _zeros(declared: Any) -> Tensor:
    """A tensor as a parameter declares it, one row where a size is open."""
    shape = [size if isinstance(size, int) else 1 for size in declared.shape]
    return torch.zeros(shape, dtype=_DTYPES[declared.dtype.name])


if __name__ == "__main__":
    sys.exit(main())
