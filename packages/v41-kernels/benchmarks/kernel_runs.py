"""Times each kernel in both tiers on FLASH widths: compiling and interpreting together, which pypto cannot separate.

For each operator, tier and number of rows: the best and the median of N runs in seconds. The first line is the start
of the worker (importing torch and pypto, loading the interpreter, the canary).

usage: kernel_runs.py [--repeats N] [--rows R ...]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor

from v41_config import FLASH
from v41_kernels import OPERATORS, Executor, Tier

CAPACITY = 4096
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def arguments(name: str, rows: int) -> dict[str, Tensor]:
    """Random tensors of the operator's contract; positions go through the table."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for tensor in OPERATORS[name].spec.bind(FLASH, T=rows, CAPACITY=CAPACITY).tensors.values():
        if tensor.spec.name == "position_ids":
            tensors["position_ids"] = torch.arange(rows, dtype=torch.int32)
        else:
            tensors[tensor.spec.name] = torch.randn(tensor.shape, generator=generator).to(DTYPES[tensor.spec.dtype])
    return tensors


def main() -> int:
    """Print a line per operator, tier and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32])
    options = parser.parse_args()
    with Executor(timeout=600.0) as executor:
        start = time.perf_counter()
        executor.run("rms_norm", **arguments("rms_norm", 0))
        print(f"first run, worker start included: {time.perf_counter() - start:.2f} s", flush=True)
        print(f"{'operator':24}{'tier':8}{'rows':>6}{'best':>8}{'median':>8}")
        for name in OPERATORS:
            for tier in Tier:
                for rows in options.rows:
                    given = arguments(name, rows)
                    seconds = [executor.run(name, tier, **given).seconds for _ in range(options.repeats)]
                    best, median = min(seconds), statistics.median(seconds)
                    print(f"{name:24}{tier.value:8}{rows:6}{best:8.2f}{median:8.2f}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
