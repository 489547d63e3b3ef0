"""Speed of sharding to disk, against copying as many bytes with `cp`, the kernel's own copy, the library and the disk.

Every side makes or reads the same bytes, in turn, in one process, from warm files and from cold ones.

    python bench_shard.py [--checkpoint DIR | --experts 48] [--dp 4] [--repeat N] [--scratch DIR]

Without `--checkpoint` a synthetic one is written to a temporary directory first: 0.6 GB, or with `--experts 48` the
2 GB of the README, which takes minutes. `--scratch` says where: on a disk, or in memory where the disk's speed is not
what is looked for. fastsafetensors takes part where it is installed.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from baselines import fast_safetensors
from baselines.page_cache import make_cold, make_warm
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from v41_config import FLASH, ModelConfig, ParallelLayout
from v41_loader import (
    DigestAlgorithm,
    Inventory,
    open_checkpoint,
    read_inventory,
    shard_checkpoint,
    synthesize_checkpoint,
)
from v41_loader.digests import new_digest
from v41_loader.layouts import get_layout
from v41_loader.sharding.output_files import open_output, start_flush, write_at
from v41_loader.sharding.part_blocks import BLOCK_BYTES, BlockBuffers, part_blocks
from v41_loader.sharding.rank_contents import rank_contents
from v41_loader.sharding.tensor_copy import tensor_copies

COPY_BYTES = 8 << 20


def wide_experts(experts: int) -> ModelConfig:
    """Six narrow layers whose routed experts are most of the bytes, as in the release."""
    return FLASH.scaled(hidden_size=2048, num_hidden_layers=6, vocab_size=1024, moe_intermediate_size=2048,
                        n_routed_experts=experts, num_experts_per_tok=2)  # fmt: skip


def synchronise(paths: Iterable[Path]) -> None:
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())


def digest_pass(paths: Iterable[Path]) -> None:
    buffer = memoryview(bytearray(BLOCK_BYTES))
    for path in paths:
        digest = new_digest(DigestAlgorithm.XXH3_128)
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])


def copy_with_cp(sources: list[Path], out: Path) -> None:
    out.mkdir()
    subprocess.run(["cp", *map(str, sources), str(out)], check=True)
    synchronise(out.iterdir())
    digest_pass(sources)


def copy_in_kernel(sources: list[Path], out: Path) -> None:
    out.mkdir()
    for path in sources:
        with path.open("rb") as source, (out / path.name).open("wb") as target:
            while os.copy_file_range(source.fileno(), target.fileno(), COPY_BYTES):
                pass
    synchronise(out.iterdir())
    digest_pass(sources)


def read_and_write(sources: list[Path], shards: list[Path], out: Path) -> None:
    """What files and disk take for themselves: all bytes read by one thread, as many written and flushed by another."""
    out.mkdir()
    with ThreadPoolExecutor(2) as pool:
        for result in (pool.submit(read_through, sources), pool.submit(write_through, shards, out)):
            result.result()


def read_through(paths: list[Path]) -> None:
    buffer = memoryview(bytearray(BLOCK_BYTES))
    for path in paths:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while file.readinto(buffer):
                pass


def write_through(shards: list[Path], out: Path) -> None:
    buffer = memoryview(os.urandom(BLOCK_BYTES))
    header = b"headers end where they end, and writes of whole pages take longer here"
    opened = [open_output(out / path.name, header[:-1], path.stat().st_size) for path in shards]
    for fd, path in zip(opened, shards, strict=True):
        size = path.stat().st_size
        for begin in range(len(header) - 1, size, COPY_BYTES):
            end = min(size, begin + COPY_BYTES)
            for offset in range(begin, end, BLOCK_BYTES):
                write_at(fd, buffer[: end - offset], offset)
            start_flush(fd, begin, end)
    for fd in opened:
        os.fsync(fd)
        os.close(fd)


def shard_with_library(inventory: Inventory, layout: ParallelLayout, out: Path) -> None:
    """The usual loop: slices of each tensor, then one `save_file` per rank."""
    with ExitStack() as files:
        opened = {
            file: files.enter_context(safe_open(source.path, framework="pt"))
            for file, source in inventory.files.items()
        }
        save_slices(inventory, layout, out, lambda name: opened[inventory.tensors[name].file].get_slice(name))


def shard_with_fast_library(inventory: Inventory, layout: ParallelLayout, out: Path) -> None:
    """The same with whole files in memory, which is how fastsafetensors reads."""
    with fast_safetensors.loaded_files(source.path for source in inventory.files.values()) as files:
        save_slices(inventory, layout, out, files.get_tensor)


def save_slices(inventory: Inventory, layout: ParallelLayout, out: Path, tensor: Callable[[str], Any]) -> None:
    out.mkdir()
    contents = rank_contents(inventory.config, layout, range(layout.world_size), get_layout("canonical"))
    for rank in range(layout.world_size):
        tensors = {}
        for name, parts in contents.parts.items():
            for part in parts:
                if rank in part.ranks:
                    cut = part.part
                    where = tuple(
                        slice(cut.start, cut.stop) if dimension == cut.axis else slice(None)
                        for dimension in range(len(cut.shape))
                    )
                    tensors[name] = tensor(name)[where].contiguous()
        save_file(tensors, out / f"rank-{rank:02d}.safetensors", metadata={"format": "pt"})
        del tensors
    synchronise(out.iterdir())


def seconds(call: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor seconds, those of finished children included."""
    wall, times = time.perf_counter(), os.times()
    call()
    elapsed, after = time.perf_counter() - wall, os.times()
    return elapsed, sum(after[:4]) - sum(times[:4])


def bench_sharding(inventory: Inventory, layout: ParallelLayout, scratch: Path, repeat: int) -> None:
    reference = scratch / "reference"
    shard_checkpoint(inventory, reference, layout)
    shards = sorted(reference.glob("rank-*"))
    nbytes = sum(path.stat().st_size for path in shards)
    sources = [source.path for source in inventory.files.values()]
    out = scratch / "out"
    sides: dict[str, tuple[list[Path], Callable[[], object]]] = {
        "cp + digest": (shards, lambda: copy_with_cp(shards, out)),
        "copy_file_range + digest": (shards, lambda: copy_in_kernel(shards, out)),
        "reading and writing alone": (sources, lambda: read_and_write(sources, shards, out)),
        "get_slice + save_file": (sources, lambda: shard_with_library(inventory, layout, out)),
        **(
            {"fastsafetensors + save_file": (sources, lambda: shard_with_fast_library(inventory, layout, out))}
            if fast_safetensors.is_installed()
            else {}
        ),
        "v41-loader shard": (sources, lambda: shard_checkpoint(inventory, out, layout)),
        "v41-loader shard, 1 thread": (sources, lambda: shard_checkpoint(inventory, out, layout, threads=1)),
    }
    print(f"sharding for tp={layout.tp}, dp={layout.dp}: {nbytes / 1e9:.2f} GB written and flushed, best of {repeat}")
    for state, prepare in (("warm", make_warm), ("cold", make_cold)):
        best = dict.fromkeys(sides, (math.inf, math.inf))
        for _ in range(repeat):
            for side, (read, call) in sides.items():
                prepare(read)
                best[side] = min(best[side], seconds(call))
                for path in shards:
                    if (out / path.name).stat().st_size != path.stat().st_size:
                        raise SystemExit(f"{side}: another {path.name}")
                shutil.rmtree(out)
        peers = [best[side][0] for side in ("cp + digest", "get_slice + save_file", "reading and writing alone")]
        print(f"{state:<30}{'GB/s':>8}{'CPU s/GB':>10}{'of cp + digest':>16}{'of library':>12}{'of the disk':>13}")
        for side, (wall, processor) in best.items():
            speeds = f"{nbytes / wall / 1e9:>8.2f}{processor / nbytes * 1e9:>10.2f}"
            ratios = (f"{peer / wall:>{width}.2f}" for peer, width in zip(peers, (16, 12, 13), strict=True))
            print(f"  {side:<28}{speeds}{''.join(ratios)}")
    shutil.rmtree(reference)


def read_ranges(inventory: Inventory, ranges: list[tuple[str, int, int]]) -> None:
    """The cost that nothing can go below: these ranges, through one buffer."""
    with ExitStack() as files:
        opened = {
            file: files.enter_context(source.path.open("rb", buffering=0)) for file, source in inventory.files.items()
        }
        buffer = memoryview(bytearray(BLOCK_BYTES))
        for file, begin, end in ranges:
            for offset in range(begin, end, BLOCK_BYTES):
                os.preadv(opened[file].fileno(), [buffer[: min(BLOCK_BYTES, end - offset)]], offset)


def bench_slicing(inventory: Inventory, layout: ParallelLayout, ranks: list[int], repeat: int) -> None:
    """FP8 weights that TP cuts, with their scales: what sharding and loading read, against `preadv` of these ranges."""
    contents = rank_contents(inventory.config, layout, ranks, get_layout("canonical"))
    copies = [
        copy
        for copy in tensor_copies(inventory, contents)
        if copy.stored.expected.rule.axis is not None and copy.stored.expected.dtype.startswith("F8")
    ]
    ranges: list[tuple[str, int, int]] = []
    for copy in copies:
        entry = copy.stored.entry
        for part in copy.parts:
            start, stop, columns = part.part.start, part.part.stop, entry.shape[1]
            if part.part.axis == 0:
                ranges.append((copy.stored.file, entry.begin + start * columns, entry.begin + stop * columns))
            else:
                ranges += [
                    (copy.stored.file, entry.begin + row * columns + start, entry.begin + row * columns + stop)
                    for row in range(entry.shape[0])
                ]
    nbytes = sum(end - begin for _, begin, end in ranges)

    def stream() -> None:
        buffers = BlockBuffers()
        with ExitStack() as files:
            opened = {
                file: files.enter_context(source.path.open("rb", buffering=0))
                for file, source in inventory.files.items()
            }
            for copy in copies:
                source = inventory.files[copy.stored.file]
                parts = [part.part for part in copy.parts]
                for _ in part_blocks(opened[copy.stored.file].fileno(), source, copy.stored.entry, parts, buffers):
                    pass

    def load() -> None:
        with open_checkpoint(inventory.directory) as checkpoint:
            for copy in copies:
                for part in copy.parts:
                    cut = part.part
                    checkpoint.part(copy.stored.expected.name, cut.axis, cut.start, cut.stop)

    sides = {
        "preadv of these ranges": lambda: read_ranges(inventory, ranges),
        "v41-loader shard (reading)": stream,
        "v41-loader Checkpoint.part": load,
    }
    for state, prepare in (("warm", make_warm), ("cold", make_cold)):
        best = dict.fromkeys(sides, math.inf)
        for _ in range(repeat):
            for side, call in sides.items():
                prepare(source.path for source in inventory.files.values())
                best[side] = min(best[side], seconds(call)[0])
        floor = best["preadv of these ranges"]
        print(f"FP8 cut by tp={layout.tp}, ranks {ranks}: {nbytes / 1e9:.3f} GB in {len(ranges)} ranges, {state}")
        print(f"{'':<30}{'GB/s':>8}{'of preadv':>12}")
        for side, wall in best.items():
            print(f"  {side:<28}{nbytes / wall / 1e9:>8.2f}{floor / wall:>12.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--experts", type=int, default=12)
    parser.add_argument("--dp", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--scratch", type=Path, help="default: the system's temporary directory")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as temporary:
        scratch = Path(temporary)
        directory = arguments.checkpoint
        if directory is None:
            directory = scratch / "checkpoint"
            with tqdm(unit="B", unit_scale=True, desc="synthetic checkpoint") as bar:
                synthesize_checkpoint(wide_experts(arguments.experts), 1, directory, progress=bar.update)
        inventory = read_inventory(directory)
        bench_sharding(inventory, ParallelLayout(1, arguments.dp), scratch, arguments.repeat)
        bench_slicing(inventory, ParallelLayout(4, 1), [0, 1, 2, 3], arguments.repeat)
        bench_slicing(inventory, ParallelLayout(4, 1), [1], arguments.repeat)


if __name__ == "__main__":
    main()
