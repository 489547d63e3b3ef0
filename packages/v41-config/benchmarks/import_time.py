"""Times `import v41_config` in fresh interpreters, beside the dependencies that are most of it.

CPU seconds do not depend on what else the machine does; more than LIMIT of them for the whole import is a failure.

usage: import_time.py [--repeats N]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time

LIMIT = 0.5
STATEMENTS = ("pass", "import numpy", "import pydantic", "import v41_config")


def run(statement: str) -> tuple[float, float]:
    """Wall and CPU seconds of one interpreter that executes the statement."""

    def cpu() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    start, used = time.perf_counter(), cpu()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start, cpu() - used


def main() -> int:
    """Print a line per statement; 1 if the last takes too long."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    print(f"{'seconds of an interpreter':26}{'best wall':>10}{'median':>8}{'best CPU':>10}")
    best = 0.0
    for statement in STATEMENTS:
        walls, cpus = zip(*(run(statement) for _ in range(repeats)), strict=True)
        best = min(cpus)
        print(f"{statement:26}{min(walls):10.3f}{statistics.median(walls):8.3f}{best:10.3f}", flush=True)
    return int(best > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
