"""Speed of reading a rank's part of a checkpoint, against `preadv` of the same bytes and against the library's slices.

Every side reads the same ranges of the same files, warm and cold, into fresh memory and keeps all of it, in turn, in
one process. fastsafetensors, which reads whole files, takes part where it is installed.

    python bench_read.py [--checkpoint DIR] [--tp 4] [--dp 2] [--rank 5] [--repeat N]

Without `--checkpoint` a synthetic one of about 0.7 GB is written to a temporary directory first.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from baselines import fast_safetensors
from baselines.page_cache import make_cold, make_warm
from safetensors import safe_open

from v41_config import FLASH6, ModelConfig, ParallelLayout
from v41_loader import Checkpoint, RankPart, load_rank, open_checkpoint, rank_part, rank_tensors, synthesize_checkpoint
from v41_loader.finite_codes import require_finite

Parts = dict[str, RankPart]


def half_width() -> ModelConfig:
    fields = {field: getattr(FLASH6, field) for field in ModelConfig.model_fields}
    return ModelConfig.model_validate(fields | {"hidden_size": 2560, "moe_intermediate_size": 1152})


def rank_parts(checkpoint: Checkpoint, layout: ParallelLayout, rank: int) -> Parts:
    parts = {}
    for name in checkpoint.names:
        part = rank_part(checkpoint.inventory.tensors[name].expected, checkpoint.config, layout, rank)
        if part is not None:
            parts[name] = part
    return parts


def read_with_preadv(checkpoint: Checkpoint, parts: Parts) -> list[np.ndarray]:
    """As many bytes from each tensor's place, contiguously: the cost that nothing can go below."""
    held = []
    with ExitStack() as files:
        opened = {
            file: files.enter_context(source.path.open("rb", buffering=0))
            for file, source in checkpoint.inventory.files.items()
        }
        for name, part in parts.items():
            stored = checkpoint.inventory.tensors[name]
            whole = np.prod(stored.expected.shape)
            buffer = np.empty(int(stored.entry.nbytes * np.prod(part.shape) // whole), np.uint8)
            count = os.preadv(opened[stored.file].fileno(), [buffer.data], stored.entry.begin)
            assert count == buffer.nbytes
            held.append(buffer)
    return held


def read_with_library(checkpoint: Checkpoint, parts: Parts) -> dict[str, torch.Tensor]:
    held = {}
    with ExitStack() as files:
        opened = {
            file: files.enter_context(safe_open(source.path, framework="pt"))
            for file, source in checkpoint.inventory.files.items()
        }
        for name, part in parts.items():
            rank = len(part.shape)
            where = tuple(slice(part.start, part.stop) if d == part.axis else slice(None) for d in range(rank))
            held[name] = opened[checkpoint.inventory.tensors[name].file].get_slice(name)[where].clone()
    return held


def read_with_fast_library(checkpoint: Checkpoint, parts: Parts) -> dict[str, torch.Tensor]:
    with fast_safetensors.loaded_files(source.path for source in checkpoint.inventory.files.values()) as files:
        held = {}
        for name, part in parts.items():
            tensor = files.get_tensor(name)
            cut = tensor if part.axis is None else tensor.narrow(part.axis, part.start, part.stop - part.start)
            held[name] = cut.clone(memory_format=torch.contiguous_format)
        return held


def look_for_non_finite(checkpoint: Checkpoint, held: dict[str, torch.Tensor]) -> None:
    """The look at every number that `rank_tensors` includes, alone."""
    for name, tensor in held.items():
        stored = checkpoint.inventory.tensors[name]
        data = tensor.view(torch.uint8).numpy()
        require_finite(data, stored.expected.dtype, name, stored.file, tuple(tensor.shape))


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    held = call()
    elapsed = time.perf_counter() - start
    del held
    return elapsed


def measure(directory: Path, layout: ParallelLayout, rank: int, repeat: int) -> None:
    with open_checkpoint(directory) as checkpoint:
        parts = rank_parts(checkpoint, layout, rank)
        ours = rank_tensors(checkpoint, layout, rank)
        for name, tensor in read_with_library(checkpoint, parts).items():
            if not torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)):
                raise SystemExit(f"{name}: the two sides differ")
        nbytes = sum(tensor.nbytes for tensor in ours.values())
        sides: dict[str, Callable[[], object]] = {
            "preadv of as many bytes": lambda: read_with_preadv(checkpoint, parts),
            "v41-loader rank_tensors": lambda: rank_tensors(checkpoint, layout, rank),
            "v41-loader load_rank, 1 thread": lambda: dict(load_rank(checkpoint, layout, rank, threads=1)),
            "the look for NaN in it": lambda: look_for_non_finite(checkpoint, ours),
            "safetensors get_slice": lambda: read_with_library(checkpoint, parts),
        }
        if fast_safetensors.is_installed():
            sides["fastsafetensors"] = lambda: read_with_fast_library(checkpoint, parts)
        paths = [source.path for source in checkpoint.inventory.files.values()]
        for state, prepare in (("warm", make_warm), ("cold", make_cold)):
            times = {side: float("inf") for side in sides}
            for _ in range(repeat):
                for side, call in sides.items():
                    prepare(paths)
                    times[side] = min(times[side], seconds(call))
            floor = times["preadv of as many bytes"]
            print(f"rank {rank} of tp={layout.tp}, dp={layout.dp}: {nbytes / 1e9:.2f} GB, {state}, best of {repeat}")
            print(f"{'':<32}{'GB/s':>8}{'of preadv':>12}")
            for side, elapsed in times.items():
                print(f"{side:<32}{nbytes / elapsed / 1e9:>8.2f}{floor / elapsed:>12.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--rank", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    layout = ParallelLayout(arguments.tp, arguments.dp)
    if arguments.checkpoint:
        measure(arguments.checkpoint, layout, arguments.rank, arguments.repeat)
        return
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "checkpoint"
        report = synthesize_checkpoint(half_width(), 1, directory)
        print(f"synthetic checkpoint: {report.nbytes / 1e9:.2f} GB")
        measure(directory, layout, arguments.rank, arguments.repeat)


if __name__ == "__main__":
    main()
