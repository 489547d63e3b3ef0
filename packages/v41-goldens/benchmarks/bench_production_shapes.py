"""Time and peak memory of every operator, of a block of each mode and of long contexts, at the released dimensions.

Eight experts, few tokens. Each case runs in a process of its own; the time is the best of N runs after one that is not
counted, the memory is what the process needed at its peak beyond its operands.

    python bench_production_shapes.py [--only TEXT] [--tokens 8] [--repeats 3] [--threads 2]

prints a Markdown table.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from v41_config import FLASH6, AttentionMode
from v41_goldens import ReferenceEngine, block
from v41_goldens.fast_attention import FAST_STAGES
from v41_goldens.fast_weights import fast_layer
from v41_goldens.fixtures import FixtureCase, operator_fixture
from v41_goldens.fixtures.long_context import long_context, random_streams
from v41_goldens.fixtures.random_layer import random_layer
from v41_goldens.operators import golden, names

Run = Callable[[], object]
LONG = (40_000, 1_048_576)


def operator_run(name: str, tokens: int) -> Run:
    """The destination form on copies of the same operands; copying them counts."""
    fixture = operator_fixture(name, FixtureCase(config=FLASH6, tokens=tokens, requests=2))

    def run() -> None:
        arguments = [
            {key: value.clone() if isinstance(value, Tensor) else value for key, value in own.items()}
            for own in fixture.arguments
        ]
        golden(name).run_ranks(fixture.bounds, arguments)

    return run


def block_run(mode: str, tokens: int, *, fast: bool) -> Run:
    """A block of this mode in its own batch; what it reads of earlier layers is zero."""
    layer = next(layer for layer in FLASH6.layers if layer.mode is AttentionMode(mode))
    weights = random_layer(FLASH6, layer.layer_id)
    own = fast_layer(weights) if fast else weights
    engine, streams = ReferenceEngine(FLASH6, None, 1, tokens, fast=fast), random_streams(FLASH6, tokens)

    def run() -> None:
        engine.release(0)
        ctx = engine.context([0], [tokens])
        if layer.index_source not in (None, layer.layer_id):
            assert layer.index_source is not None
            ctx.topk[layer.index_source] = torch.full((tokens, FLASH6.index_topk), -1, dtype=torch.int32)
        if layer.candidate_source is not None:
            blocks = -(-tokens // FLASH6.candidate_block_size)
            ctx.candidate_blocks = torch.ones(tokens, blocks, dtype=torch.bool)
        block(ctx, layer, own, *streams)

    return run


def decode_run(context: int, *, fast: bool) -> Run:
    """One token of a C1A Full block behind a long past."""
    layer = next(layer for layer in FLASH6.layers if layer.mode is AttentionMode.C1A_FULL)
    ctx, streams, weights = long_context(FLASH6, context), random_streams(FLASH6, 1), random_layer(FLASH6, 3)
    if fast:
        ctx.stages, weights = FAST_STAGES, fast_layer(weights)

    def run() -> None:
        ctx.candidate_blocks = None
        block(ctx, layer, weights, *streams)

    return run


def cases(tokens: int) -> dict[str, Callable[[], Run]]:
    """What is measured, by name; each makes its operands when it is called."""
    found: dict[str, Callable[[], Run]] = {name: lambda name=name: operator_run(name, tokens) for name in names()}  # type: ignore[misc]
    for fast in (False, True):
        arithmetic = "fast" if fast else "exact"
        for mode in AttentionMode:
            found[f"block {mode.title}, {arithmetic}"] = lambda m=mode.value, f=fast: block_run(m, tokens, fast=f)  # type: ignore[misc]
        for context in LONG:
            title = f"block {AttentionMode.C1A_FULL.title}, 1 token at {context:,}, {arithmetic}"
            found[title] = lambda c=context, f=fast: decode_run(c, fast=f)  # type: ignore[misc]
    return found


def peak_mib() -> float:
    """Of this process alone: what `getrusage` tells would begin with its parent's."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def measure(make: Callable[[], Run], repeats: int) -> str:
    """Columns of one row: seconds, MiB beyond the operands, MiB of the process."""
    run = make()
    before, best = peak_mib(), float("inf")
    with torch.inference_mode():
        for repeat in range(repeats + 1):
            start = time.perf_counter()
            run()
            if repeat:
                best = min(best, time.perf_counter() - start)
    return f"{1e3 * best:.1f} | {peak_mib() - before:.0f} | {peak_mib():.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    found = cases(options.tokens)
    if options.case is not None:
        torch.set_num_threads(options.threads)
        print(measure(found[options.case], options.repeats))
        return 0
    print(f"torch {torch.__version__}, {options.threads} threads, {options.tokens} tokens, best of {options.repeats}\n")
    print("| | ms | peak MiB beyond operands | peak MiB of the process |\n|---|---|---|---|")
    failed = 0
    for name in found:
        if options.only not in name:
            continue
        done = subprocess.run(
            [sys.executable, __file__, "--case", name, "--tokens", str(options.tokens),
             "--repeats", str(options.repeats), "--threads", str(options.threads)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        failed += done.returncode != 0
        row = done.stdout.strip() if done.returncode == 0 else f"failed: {done.stderr.strip().splitlines()[-1]}"
        print(f"| {name} | {row} |", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
