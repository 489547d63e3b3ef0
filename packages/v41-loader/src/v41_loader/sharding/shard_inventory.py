"""What a sharded directory holds, proven against config and manifest from its headers alone (no torch, no payload)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from v41_config.model_config import ModelConfig
from v41_config.parallel_layout import ParallelLayout
from v41_loader.digests import digest_of
from v41_loader.errors import (
    DigestMismatchError,
    ManifestError,
    MissingRankError,
    MissingTensorError,
    TensorDtypeError,
    TensorOffsetsError,
    TensorShapeError,
    UnknownTensorError,
    WeightLayoutError,
)
from v41_loader.header import read_header
from v41_loader.header_entries import TensorEntry
from v41_loader.index import MANIFEST_FILE
from v41_loader.inventory import CONFIG_FILE, read_config
from v41_loader.layouts import get_layout
from v41_loader.rules import RULES_VERSION
from v41_loader.sharding.manifest import Manifest, PartDigests, read_manifest
from v41_loader.sharding.rank_contents import RankContents, rank_contents, rank_file
from v41_loader.source_files import SourceFile, open_source, read_span, reopen_source


@dataclass(frozen=True)
class ShardInventory:
    """A sharded directory whose rank files hold exactly the parts that config and layout imply.

    `contents` and `files` are of the ranks that were asked for.
    """

    directory: Path
    manifest: Manifest
    config: ModelConfig
    layout: ParallelLayout
    contents: RankContents
    files: Mapping[int, SourceFile]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.files)


def read_shard_inventory(
    directory: str | Path, ranks: Iterable[int] | None = None, weight_layout: str | None = None
) -> ShardInventory:
    """Check a sharded directory without reading its payload.

    Args:
        ranks: those to look at; by default all that the directory has.
        weight_layout: the byte layout that the caller reads; any by default.

    Raises:
        ManifestError: the manifest is missing, malformed, of another version, or of another set of tensors.
        WeightLayoutError: the weights stand in another byte layout than `weight_layout`.
        MissingRankError: the directory does not have a rank.
        DigestMismatchError: `config.json` is not the one that the shards were made with.
        CheckpointError: a rank file is not what config and layout imply: as `read_inventory`.
        LayoutError: the manifest's layout does not fit the config.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    settings = manifest.settings
    if settings.rules_version != RULES_VERSION:
        raise ManifestError(f"{MANIFEST_FILE}: rules_version", settings.rules_version, str(RULES_VERSION))
    if weight_layout is not None and settings.weight_layout.name != weight_layout:
        raise WeightLayoutError(str(directory), settings.weight_layout.name, f"shards in the {weight_layout} layout")
    byte_layout = get_layout(settings.weight_layout.name)
    if byte_layout.version != settings.weight_layout.version:
        raise WeightLayoutError(
            f"{settings.weight_layout.name} layout in {directory}",
            f"version {settings.weight_layout.version}",
            f"version {byte_layout.version}",
        )
    config = _config(directory, manifest)
    layout = ParallelLayout(settings.tp, settings.dp)
    layout.check(config)  # bounds the world before anything is made for every rank
    held = _held_ranks(manifest, layout)
    asked = held if ranks is None else tuple(sorted(set(ranks)))
    for rank in asked:
        if rank not in held:
            raise MissingRankError(str(directory), f"ranks {list(held)}", f"rank {rank}")
    contents = rank_contents(config, layout, asked, byte_layout)
    _compare_manifest(manifest, contents)
    files = {rank: _checked_file(directory, rank, manifest, contents) for rank in asked}
    return ShardInventory(directory, manifest, config, layout, contents, files)


def _config(directory: Path, manifest: Manifest) -> ModelConfig:
    config, file = read_config(directory)
    with reopen_source(file) as fd:
        digest = digest_of(read_span(fd, file, 0, file.nbytes), manifest.settings.digest)
    if digest != manifest.settings.config:
        raise DigestMismatchError(CONFIG_FILE, digest, f"{manifest.settings.config}, as {MANIFEST_FILE} states")
    return config


def _held_ranks(manifest: Manifest, layout: ParallelLayout) -> tuple[int, ...]:
    names = {rank_file(rank): rank for rank in range(layout.world_size)}
    if unknown := manifest.shards.keys() - names:
        raise ManifestError(
            f"{MANIFEST_FILE}: shards", sorted(unknown), f"rank files of tp={layout.tp}, dp={layout.dp}"
        )
    return tuple(rank for name, rank in names.items() if name in manifest.shards)


def _compare_manifest(manifest: Manifest, contents: RankContents) -> None:
    """Every tensor, every part of it and every part's digest must be there, and no more."""
    if unknown := manifest.tensors.keys() - contents.parts_of:
        raise UnknownTensorError(f"{min(unknown)} in {MANIFEST_FILE}", min(unknown), "a tensor that the config has")
    digits = manifest.settings.digest.hex_digits
    for name, parts_of in contents.parts_of.items():
        where = f"{MANIFEST_FILE}: {name}"
        digests = manifest.tensors.get(name)
        if digests is None:
            raise MissingTensorError(where, "no digests", f"digests of {parts_of} parts")
        for listed in (digests.source, digests.in_rank_files):
            if len(listed) != parts_of or any(digest and len(digest) != digits for digest in listed):
                raise ManifestError(where, list(listed), f"{parts_of} digests of {digits} digits")
        for part in contents.parts[name]:
            _require_digests(where, digests, part.number, transformed=part.transform is not None)


def _require_digests(where: str, digests: PartDigests, number: int, transformed: bool) -> None:
    if None in (digests.source[number], digests.in_rank_files[number]):
        raise ManifestError(where, None, f"a digest of part {number}, which a rank file holds")
    if transformed != (digests.stored is not None):
        raise ManifestError(where, digests, f"digests of {'two forms' if transformed else 'one form'}")


def _checked_file(directory: Path, rank: int, manifest: Manifest, contents: RankContents) -> SourceFile:
    name = rank_file(rank)
    with open_source(directory, name) as (fd, source):
        found = read_header(fd, source)
        if source.nbytes != manifest.shards[name]:
            raise ManifestError(f"{MANIFEST_FILE}: {name}", manifest.shards[name], f"the file's {source.nbytes} bytes")
    entries = contents.entries[rank]
    if missing := entries.keys() - found.keys():
        raise MissingTensorError(f"{min(missing)} in {name}", "no tensor", f"all tensors that rank {rank} holds")
    if unknown := found.keys() - entries.keys():
        raise UnknownTensorError(f"{min(unknown)} in {name}", min(unknown), f"a tensor that rank {rank} holds")
    for tensor, expected in entries.items():
        _compare_entry(f"{tensor} in {name}", found[tensor], expected)
    return source


def _compare_entry(where: str, found: TensorEntry, expected: TensorEntry) -> None:
    if found.dtype != expected.dtype:
        raise TensorDtypeError(where, found.dtype, expected.dtype)
    if found.shape != expected.shape:
        raise TensorShapeError(where, list(found.shape), str(list(expected.shape)))
    if (found.begin, found.end) != (expected.begin, expected.end):
        raise TensorOffsetsError(where, [found.begin, found.end], f"bytes {expected.begin} to {expected.end}")
