"""Names of a checkpoint's files, and the index that says which shard holds which tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from v41_loader.errors import AmbiguousCheckpointError, CheckpointNotFoundError, IndexSchemaError
from v41_loader.source_files import read_document, require_plain_name, source_exists
from v41_loader.strict_json import parse_json_object

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MANIFEST_FILE = "manifest.json"
"""Of a directory of shards, which has neither of the others."""


def shard_file(shard: int, shards: int) -> str:
    """The file name of shard `shard` (from 0) of `shards`."""
    return f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"


@dataclass(frozen=True)
class CheckpointIndex:
    """Which files hold the tensors, each with one of them. A single-file checkpoint has no weight map."""

    files: Mapping[str, str]
    weight_map: Mapping[str, str] | None = None
    total_size: int | None = None


def read_index(directory: Path, allowed_root: Path | None = None) -> CheckpointIndex:
    """The index of a released directory, or the one file of a single-file checkpoint.

    Raises:
        CheckpointNotFoundError: neither is there.
        AmbiguousCheckpointError: both are.
        IndexSchemaError: the index has another form; and what reading strict JSON raises.
        ShardNameError: it names a file by a path.
    """
    has_index, has_single = (source_exists(directory, name) for name in (INDEX_FILE, SINGLE_FILE))
    if has_index and has_single:
        raise AmbiguousCheckpointError(str(directory), [INDEX_FILE, SINGLE_FILE], "one of them")
    if has_single:
        return CheckpointIndex({SINGLE_FILE: "all tensors"})
    if not has_index:
        shards = f"{MANIFEST_FILE} of shards, which open_shards and v41-loader verify take"
        found = shards if source_exists(directory, MANIFEST_FILE) else "neither of them"
        raise CheckpointNotFoundError(str(directory), found, f"{INDEX_FILE} or {SINGLE_FILE}")
    document = parse_json_object(read_document(directory, INDEX_FILE, allowed_root), INDEX_FILE)
    weight_map, metadata = document.pop("weight_map", None), document.pop("metadata", {})
    if document:
        raise IndexSchemaError(INDEX_FILE, sorted(document), "no keys but metadata and weight_map")
    if not isinstance(metadata, dict):
        raise IndexSchemaError(f"{INDEX_FILE}: metadata", type(metadata).__name__, "an object")
    total_size = metadata.get("total_size")
    if total_size is not None and type(total_size) is not int:
        raise IndexSchemaError(f"{INDEX_FILE}: metadata.total_size", total_size, "a number of bytes")
    if not isinstance(weight_map, dict) or not weight_map:
        raise IndexSchemaError(f"{INDEX_FILE}: weight_map", type(weight_map).__name__, "an object of tensors")
    first_tensors: dict[str, str] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise IndexSchemaError(f"{INDEX_FILE}: {name}", file, "the name of a file")
        if file not in first_tensors:
            require_plain_name(file, f"{INDEX_FILE}: {name}")
            first_tensors[file] = name
    return CheckpointIndex(dict(sorted(first_tensors.items())), weight_map, total_size)
