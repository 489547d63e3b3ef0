"""Runs every `packages/*/benchmarks/*.py` in turn and says what it ran; the exit code counts those that failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WORKSPACE = Path(__file__).parents[1]


def main() -> int:
    benchmarks = sorted(WORKSPACE.glob("packages/*/benchmarks/*.py"))
    failed = []
    for benchmark in benchmarks:
        name = benchmark.relative_to(WORKSPACE)
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, benchmark], cwd=WORKSPACE, check=False).returncode != 0:
            failed.append(name)
    print(f"== ran {len(benchmarks)} benchmarks, {len(failed)} failed{''.join(f' {name}' for name in failed)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
