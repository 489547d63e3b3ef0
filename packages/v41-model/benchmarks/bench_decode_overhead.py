"""Where a decode step's time goes, on TINY, eight ranks: each operator, and metadata, communication and Python.

The share counts processor time, of one request per sequence slot; the operators are the goldens.

    python bench_decode_overhead.py [--requests 8] [--steps 10]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from instruments.operator_times import OperatorTimes

from v41_config import TINY, ParallelLayout
from v41_loader import open_checkpoint, synthesize_checkpoint
from v41_model.generation import Request, admit, advance
from v41_model.session import ModelSession

LAYOUT = ParallelLayout(tp=4, dp=2)
PROMPT = (0, 17, 42, 9, 8, 99)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        synthesize_checkpoint(TINY, 4105, Path(temporary) / "tiny")
        with open_checkpoint(Path(temporary) / "tiny") as checkpoint:
            session = ModelSession.open(checkpoint, LAYOUT)
    inside = OperatorTimes()
    session.operators = inside.table()
    warm_up = 3
    requests = [Request((*PROMPT, 100 + index), options.steps + warm_up) for index in range(options.requests)]
    groups = admit(session, requests)
    for _ in range(warm_up):
        advance(session, groups)
    inside.seconds.clear()
    began = time.process_time()
    for _ in range(options.steps):
        advance(session, groups)
    step = (time.process_time() - began) / options.steps
    operators = inside.total / options.steps
    moved = sum(r.seconds for c in session.world.communicators for r in c.log.records)
    print(f"decode of {options.requests} rows on TINY, TP4 DP2, one thread: {1000 * step:.1f} ms a step")
    print(
        f"    operators {1000 * operators:.1f} ms, collectives {1000 * moved:.1f} ms, the rest is metadata and Python"
    )
    print(inside.report(options.steps))
    print(f"outside operators: {100 * (1 - operators / step):.1f} % (wanted: below 25 %)")


if __name__ == "__main__":
    main()
