"""What judging a kernel costs: both tiers against compiling alone, at FLASH's widths.

For each operator and number of rows: seconds to compile to the tensor graph, to compile and interpret it (graph tier),
and to compile through all passes with six re-interpretations (passes tier), best of N runs each; and the ratios of the
two tiers to compiling. `v41-kernels bench` has bytes, operations and rooflines.

usage: kernel_runs.py [--repeats N] [--rows R ...] [NAME ...]
"""

from __future__ import annotations

import argparse
import time

from v41_config import FLASH6
from v41_kernels import Executor, Tier
from v41_kernels.bench_operands import bench_operands, bind_for_bench

NAMES = ("rms_norm", "materialize_rope_rows", "mhc_pre", "mhc_post", "publish_window_kv", "gate")


def main() -> int:
    """Print a line per operator and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[8])
    options = parser.parse_args()
    with Executor(timeout=900.0) as executor:
        start = time.perf_counter()
        executor.run("rms_norm", **bench_operands(bind_for_bench("rms_norm", FLASH6, 1)))
        print(f"first run, worker start included: {time.perf_counter() - start:.2f} s", flush=True)
        print(f"{'operator':28}{'rows':>6}{'compile':>9}{'graph':>9}{'passes':>9}{'graph/c':>9}{'passes/c':>9}")
        for name in options.names:
            for rows in options.rows:
                arguments = bench_operands(bind_for_bench(name, FLASH6, rows))
                compiled = min(
                    sum(launch.compile_seconds for launch in executor.measure(name, **arguments))
                    for _ in range(options.repeats)
                )
                graph, passes = (
                    min(executor.run(name, tier, **arguments).seconds for _ in range(options.repeats))
                    for tier in (Tier.GRAPH, Tier.PASSES)
                )
                print(
                    f"{name:28}{rows:6}{compiled:9.2f}{graph:9.2f}{passes:9.2f}"
                    f"{graph / compiled:9.1f}{passes / compiled:9.1f}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
