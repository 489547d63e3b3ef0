"""What a checkpoint directory holds, proven against its config from index and headers alone (no torch, no payload)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple, NoReturn

from v41_config.model_config import ModelConfig
from v41_loader.errors import (
    CheckpointNotFoundError,
    DuplicateTensorError,
    EngramCheckpointError,
    IndexCoverageError,
    MissingTensorError,
    TensorDtypeError,
    TensorShapeError,
    TotalSizeError,
    UnknownTensorError,
)
from v41_loader.expected_tensors import ExpectedTensor, expected_tensors
from v41_loader.garbage_collection import collection_paused
from v41_loader.header import read_header
from v41_loader.header_entries import TensorEntry
from v41_loader.index import INDEX_FILE, CheckpointIndex, read_index
from v41_loader.rules import TensorGroup
from v41_loader.source_files import SourceFile, open_source, require_unchanged

CONFIG_FILE = "config.json"
NOT_COMPARABLE = "not comparable with the released model"
"""What every output made from an Engram checkpoint without its Engram says."""


class StoredTensor(NamedTuple):
    """A tensor of the config and the place where its bytes stand."""

    expected: ExpectedTensor
    file: str
    entry: TensorEntry


@dataclass(frozen=True)
class GroupTotal:
    """Number and bytes of the tensors of one class."""

    group: TensorGroup
    skipped: bool
    tensors: int
    nbytes: int

    def to_json(self) -> dict[str, object]:
        """As JSON values."""
        return {"class": self.group.value, "tensors": self.tensors, "bytes": self.nbytes, "skipped": self.skipped}


@dataclass(frozen=True)
class Inventory:
    """A checked checkpoint: its tensors are exactly those of the config, in the released dtypes and shapes."""

    directory: Path
    config: ModelConfig
    files: Mapping[str, SourceFile]
    tensors: Mapping[str, StoredTensor]
    config_file: SourceFile | None = None
    """The `config.json` that `config` was read from; None where it was given."""

    @property
    def notice(self) -> str | None:
        """What must be said of every result: `NOT_COMPARABLE` where the checkpoint has an Engram, else None."""
        return NOT_COMPARABLE if self.config.engram else None

    def group_totals(self) -> tuple[GroupTotal, ...]:
        """One entry per class that occurs, in the order of `TensorGroup`."""
        return total_by_group(stored.expected for stored in self.tensors.values())

    def to_json(self) -> dict[str, object]:
        """Files, tensors and bytes, in all and by class, as JSON values."""
        totals = self.group_totals()
        return {
            "directory": str(self.directory),
            "files": len(self.files),
            "tensors": len(self.tensors),
            "bytes": sum(total.nbytes for total in totals),
            "classes": [total.to_json() for total in totals],
            "notice": self.notice,
        }


def total_by_group(tensors: Iterable[ExpectedTensor]) -> tuple[GroupTotal, ...]:
    """One entry per class that occurs, in the order of `TensorGroup`."""
    groups: dict[TensorGroup, list[ExpectedTensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.rule.group, []).append(tensor)
    return tuple(
        GroupTotal(group, members[0].skipped, len(members), sum(member.nbytes for member in members))
        for group in TensorGroup
        if (members := groups.get(group))
    )


def skipped_groups(config: ModelConfig) -> tuple[GroupTotal, ...]:
    """The classes of a checkpoint that text inference leaves out."""
    return total_by_group(tensor for tensor in expected_tensors(config).values() if tensor.skipped)


def read_inventory(
    directory: str | Path,
    config: ModelConfig | None = None,
    without_engram: bool = False,
    allowed_root: str | Path | None = None,
) -> Inventory:
    """Check a released-format directory (index and shards, or one `model.safetensors`).

    Args:
        config: what the tensors must agree with; the directory's `config.json` by default.
        without_engram: accept a checkpoint with Engram, whose text without it is `NOT_COMPARABLE`.
        allowed_root: a directory outside that links may end in, such as the root of a Hugging Face cache.

    Raises:
        CheckpointError: the subclass of the first invariant that does not hold, naming tensor and file.
        ConfigError: `config.json` is not a config of this model.
    """
    directory = Path(directory)
    root = Path(allowed_root) if allowed_root is not None else None
    if not directory.is_dir():
        raise CheckpointNotFoundError(str(directory), "no directory", "a checkpoint directory")
    if root is not None and not root.is_dir():
        raise CheckpointNotFoundError(f"allowed root {root}", "no directory", "a directory that links may lead to")
    config_file = None
    if config is None:
        config, config_file = read_config(directory, root)
    if config.engram and not without_engram:
        raise EngramCheckpointError(
            str(directory),
            f"Engram in layers {list(config.engram.layer_ids)}",
            f"a checkpoint without Engram, or without_engram (--without-engram), which is {NOT_COMPARABLE}",
        )
    with collection_paused():
        files, tensors = _read_files(directory, config, root)
    return Inventory(directory, config, files, tensors, config_file)


def _read_files(
    directory: Path, config: ModelConfig, root: Path | None
) -> tuple[Mapping[str, SourceFile], Mapping[str, StoredTensor]]:
    index = read_index(directory, root)
    files: dict[str, SourceFile] = {}
    held = _HeldTensors({}, {})
    for file, first_tensor in index.files.items():
        with open_source(directory, file, root, wanted_for=first_tensor) as (fd, source):
            files[file] = source
            held.add(file, read_header(fd, source))
    _compare_with_index(index, held)
    return files, _compare_with_config(config, held, index.total_size)


@dataclass(frozen=True)
class _HeldTensors:
    """What the headers of all files say, by tensor. Two flat mappings: they grow without a step per tensor."""

    files: dict[str, str]
    entries: dict[str, TensorEntry]

    def add(self, file: str, header: Mapping[str, TensorEntry]) -> None:
        if repeated := self.files.keys() & header.keys():
            name = next(name for name in header if name in repeated)
            raise DuplicateTensorError(f"{name} in {file}", self.files[name], "a tensor in one file")
        self.files.update(dict.fromkeys(header, file))
        self.entries.update(header)


def read_config(directory: Path, root: Path | None = None) -> tuple[ModelConfig, SourceFile]:
    """A directory's `config.json`, and the file as it was read; errors as `open_source` and `ModelConfig.from_json`."""
    with open_source(directory, CONFIG_FILE, root) as (fd, source):
        config = ModelConfig.from_json(source.path)
        require_unchanged(fd, source)
        return config, source


def _compare_with_index(index: CheckpointIndex, held: _HeldTensors) -> None:
    if index.weight_map is None or index.weight_map == held.files:
        return
    for name, file in index.weight_map.items():
        if held.files.get(name) != file:
            holder = held.files.get(name, "a file")
            raise IndexCoverageError(f"{name} in {INDEX_FILE}", file, f"{holder} that holds the tensor")
    name = next(name for name in held.files if name not in index.weight_map)
    raise IndexCoverageError(f"{name} in {held.files[name]}", "no entry", f"an entry in {INDEX_FILE}")


def _compare_with_config(config: ModelConfig, held: _HeldTensors, total_size: int | None) -> Mapping[str, StoredTensor]:
    expected = expected_tensors(config)
    if expected.keys() != held.entries.keys():
        _require_known(held, expected)  # a renamed tensor is told by the name it has
        name, tensor = next((name, tensor) for name, tensor in expected.items() if name not in held.entries)
        raise MissingTensorError(name, "no tensor", f"{tensor.dtype} {list(tensor.shape)} in a shard")
    entries = list(map(held.entries.__getitem__, expected))
    wanted = [(rule.dtype, shape) for _, rule, shape, _, _ in expected.values()]
    if wanted != list(map(itemgetter(1, 2), entries)):
        _raise_difference(held, expected)
    found = sum(map(itemgetter(4), entries)) - sum(map(itemgetter(3), entries))
    if total_size not in (None, found):
        raise TotalSizeError(f"total_size in {INDEX_FILE}", total_size, f"the tensors' {found} bytes")
    files = map(held.files.__getitem__, expected)
    return dict(zip(expected, map(StoredTensor, expected.values(), files, entries), strict=True))


def _raise_difference(held: _HeldTensors, expected: Mapping[str, ExpectedTensor]) -> NoReturn:
    """The error of the first tensor that is stored in another form than expected."""
    for name, tensor in expected.items():
        _, dtype, shape, _, _ = held.entries[name]
        where = f"{name} in {held.files[name]}"
        if dtype != tensor.dtype:
            raise TensorDtypeError(where, dtype, tensor.dtype)
        if shape != tensor.shape:
            raise TensorShapeError(where, list(shape), str(list(tensor.shape)))
    raise AssertionError("no tensor differs")


def _require_known(held: _HeldTensors, expected: Mapping[str, ExpectedTensor]) -> None:
    for name, file in held.files.items():
        if name not in expected:
            raise UnknownTensorError(f"{name} in {file}", name, "a tensor that the config has")
