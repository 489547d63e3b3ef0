"""Checkpoints of real headers and no payload: sparse files, for planning and coverage at full size on a small disk."""

from __future__ import annotations

import os
from pathlib import Path

from v41_config.model_config import ModelConfig
from v41_loader.errors import SparseFilesError
from v41_loader.expected_tensors import ExpectedTensor, expected_tensors
from v41_loader.header import encode_header
from v41_loader.index import shard_file
from v41_loader.rules import Layers, TensorGroup
from v41_loader.synth.checkpoint_writer import SynthesisReport
from v41_loader.synth.staging import appearing_at_once, write_descriptions

_PROBE_BYTES = 16 << 20
"""A hole that no file system stores as data by chance, small enough to do no harm on one that does."""

_BLOCK_BYTES = 512
"""The unit of `st_blocks`."""


def synthesize_headers(config: ModelConfig, directory: str | Path) -> SynthesisReport:
    """Write a checkpoint of `config` whose shards have complete headers and, for payload, a hole that reads as zeros.

    The tensors are all of them, also those that text inference skips, spread as `shards_of` says. Files have their
    full size and take the disk that their headers take. They appear in `directory` (which must not exist, or be
    empty) all at once.

    Raises:
        SparseFilesError: the file system would store the holes as data.
        SynthesisError: the directory is not empty, the file system has no room or no files that long.
    """
    weight_map: dict[str, str] = {}
    shards = shards_of(config)
    with appearing_at_once(Path(directory)) as staging:
        _require_sparse_files(staging)
        for number, tensors in enumerate(shards):
            name = shard_file(number, len(shards))
            header, entries = encode_header((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
            with (staging / name).open("wb") as file:
                file.write(header)
                file.truncate(max(entry.end for entry in entries.values()))
            weight_map |= dict.fromkeys(entries, name)
        total = sum(tensor.nbytes for tensors in shards for tensor in tensors)
        write_descriptions(staging, config, weight_map, total)
    return SynthesisReport(len(weight_map), total, tuple(sorted(set(weight_map.values()))))


def shards_of(config: ModelConfig) -> tuple[tuple[ExpectedTensor, ...], ...]:
    """The tensors of each shard in the order of the release: vision, embedding, layer by layer, drafting layers, final
    norm and head, and the Engram of each of its layers. That is 48 for the released config.
    """
    shards: dict[tuple[int, int], list[ExpectedTensor]] = {}
    for tensor in expected_tensors(config).values():
        shards.setdefault(_place(tensor), []).append(tensor)
    return tuple(tuple(tensors) for _, tensors in sorted(shards.items()))


def _place(tensor: ExpectedTensor) -> tuple[int, int]:
    layer = tensor.layer or 0
    match tensor.rule.group:
        case TensorGroup.VISION:
            return 0, 0
        case TensorGroup.EMBEDDING:
            return 1, 0
        case TensorGroup.DRAFTING:
            return 3, layer
        case TensorGroup.ENGRAM:
            return 5, layer
        case _:
            return (4, 0) if tensor.rule.layers is Layers.NONE else (2, layer)


def _require_sparse_files(directory: Path) -> None:
    """Raise `SparseFilesError` unless a hole in a file takes no disk there."""
    path = directory / "hole"
    with path.open("wb") as file:
        file.truncate(_PROBE_BYTES)
        os.fsync(file.fileno())
        taken = os.fstat(file.fileno()).st_blocks * _BLOCK_BYTES
    path.unlink()
    if taken >= _PROBE_BYTES // 2:
        expected = "a file system that stores no holes (sparse files)"
        raise SparseFilesError(str(directory.parent), f"{taken} bytes taken by a hole of {_PROBE_BYTES}", expected)
