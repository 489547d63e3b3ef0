"""Writes whole synthetic checkpoints: threads make bands of rows and put them at their place in the shard files."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from v41_config.model_config import ModelConfig
from v41_loader.bounded_jobs import Job, run_jobs
from v41_loader.errors import SynthesisError
from v41_loader.expected_tensors import ExpectedTensor, expected_tensors
from v41_loader.header import encode_header
from v41_loader.header_entries import TensorEntry
from v41_loader.index import shard_file
from v41_loader.synth.recipe import distribution_of
from v41_loader.synth.row_bands import RowBand, StoredBytes, make_band, row_bands
from v41_loader.synth.staging import appearing_at_once, write_descriptions

MIN_SHARDS = 2
"""The embedding and the final norm stand in different shards."""

DEFAULT_SHARDS = 6

MAX_SHARDS = 99_999
"""File names have five digits."""


@dataclass(frozen=True)
class SynthesisReport:
    """What was written."""

    tensors: int
    nbytes: int
    files: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """As JSON values."""
        return {"tensors": self.tensors, "bytes": self.nbytes, "files": list(self.files)}


def synthesized_tensors(config: ModelConfig) -> dict[str, ExpectedTensor]:
    """The tensors of a synthetic checkpoint by name: text inference and the image tokens' router bias."""

    def has_recipe(tensor: ExpectedTensor) -> bool:
        scaled = tensor.rule.scales
        weight = expected_tensors(config)[tensor.name.removesuffix(".scale") + ".weight"] if scaled else tensor
        return distribution_of(weight) is not None

    return {name: tensor for name, tensor in expected_tensors(config).items() if has_recipe(tensor)}


def synthesize_checkpoint(
    config: ModelConfig,
    seed: int,
    directory: str | Path,
    shards: int = DEFAULT_SHARDS,
    progress: Callable[[int], object] | None = None,
    threads: int | None = None,
) -> SynthesisReport:
    """Write the synthetic checkpoint `(config, seed)` in the released on-disk format.

    The files appear in `directory` (which must not exist, or be empty) all at once when they are complete. Their
    bytes depend on `config`, `seed` and `shards` alone.

    Args:
        shards: files that the tensors are spread over: embedding first, layers between, norm and head last.
        progress: called with the number of payload bytes whenever some were written, from the calling thread.
        threads: threads to compute with; all processors by default.

    Raises:
        SynthesisError: the directory is not empty, fewer or more shards than file names can count, a negative or too
            large seed, a full disk.
    """
    if not MIN_SHARDS <= shards <= MAX_SHARDS:
        raise SynthesisError("shards", shards, f"{MIN_SHARDS} to {MAX_SHARDS}")
    if not 0 <= seed < 2**64:
        raise SynthesisError("seed", seed, "an unsigned 64-bit number")
    tensors = synthesized_tensors(config)
    by_shard: dict[int, list[ExpectedTensor]] = defaultdict(list)
    for tensor in tensors.values():
        by_shard[_shard_of(tensor, config, shards)].append(tensor)
    weight_map = {t.name: shard_file(shard, shards) for shard, members in by_shard.items() for t in members}
    total = sum(tensor.nbytes for tensor in tensors.values())
    with appearing_at_once(Path(directory)) as staging:
        free = shutil.disk_usage(staging).free
        if total > free:
            raise SynthesisError(str(directory), f"{free:,} bytes free", f"room for {total:,} bytes")
        _write_shards(staging, {shard_file(i, shards): members for i, members in sorted(by_shard.items())}, seed,
                      progress or (lambda _: None), threads or os.cpu_count() or 1)  # fmt: skip
        write_descriptions(staging, config, weight_map, total)
    return SynthesisReport(len(tensors), total, tuple(sorted(set(weight_map.values()))))


def _shard_of(tensor: ExpectedTensor, config: ModelConfig, shards: int) -> int:
    if tensor.layer is not None:
        return 1 + tensor.layer * (shards - 2) // config.num_hidden_layers
    return 0 if tensor.name.startswith("embed") else shards - 1


def _write_shards(
    directory: Path,
    members: Mapping[str, list[ExpectedTensor]],
    seed: int,
    progress: Callable[[int], object],
    threads: int,
) -> None:
    """Shard after shard, so that the disk sees whole files in order; at most a few bands are in memory."""
    with ExitStack() as files, closing(run_jobs(_band_jobs(directory, members, seed, files), threads)) as written:
        for nbytes in written:
            progress(nbytes)


def _band_jobs(
    directory: Path, members: Mapping[str, list[ExpectedTensor]], seed: int, files: ExitStack
) -> Iterator[Job[int]]:
    for file, tensors in members.items():
        header, entries = encode_header((t.name, t.dtype, t.shape) for t in tensors)
        handle = files.enter_context((directory / file).open("wb"))
        handle.write(header)
        handle.truncate(max(entry.end for entry in entries.values()))
        handle.flush()
        for band in (band for t in tensors if t.rule.scales is None for band in row_bands(t)):
            yield Job(partial(_write_band, handle.fileno(), entries, band, seed))


def _write_band(fd: int, entries: Mapping[str, TensorEntry], band: RowBand, seed: int) -> int:
    weight, scale = make_band(band, seed)
    tensor = band.tensor
    written = _write_rows(fd, entries[tensor.name], band, weight)
    if scale is not None:
        written += _write_rows(fd, entries[tensor.name.removesuffix(".weight") + ".scale"], band, scale)
    return written


def _write_rows(fd: int, entry: TensorEntry, band: RowBand, data: StoredBytes) -> int:
    logical_rows = band.tensor.shape[0]  # weights are stored row by row, so logical rows are stored rows
    offset = entry.begin + entry.nbytes * band.start // logical_rows
    view = data.data
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count
    return int(data.nbytes)
