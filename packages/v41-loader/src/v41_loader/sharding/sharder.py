"""Shards a checkpoint: every byte that ranks need is read once, in file order, and written to the ranks' files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from v41_config.parallel_layout import ParallelLayout
from v41_loader.bounded_jobs import thread_count
from v41_loader.digests import DigestAlgorithm, digest_of
from v41_loader.errors import DigestMismatchError, OutputConflictError, SourceChangedError
from v41_loader.garbage_collection import collection_paused
from v41_loader.index import MANIFEST_FILE
from v41_loader.inventory import GroupTotal, Inventory, skipped_groups
from v41_loader.layouts import get_layout
from v41_loader.partition import checked_ranks
from v41_loader.rules import RULES_VERSION
from v41_loader.sharding.journal import RunIdentity
from v41_loader.sharding.manifest import (
    MANIFEST_VERSION,
    Manifest,
    PartDigests,
    ShardSettings,
    SourceState,
    WeightLayoutId,
)
from v41_loader.sharding.output_directory import output_directory
from v41_loader.sharding.rank_contents import GroupContents, RankContents, rank_contents, rank_file
from v41_loader.sharding.rank_file_writer import Progress, RankFileWriter
from v41_loader.sharding.tensor_copy import tensor_copies
from v41_loader.source_files import read_span, reopen_source


@dataclass(frozen=True)
class ShardReport:
    """What a run did: `written` are the ranks whose files it made, `kept` those whose files stood there complete."""

    directory: Path
    manifest: Manifest
    written: tuple[int, ...]
    kept: tuple[int, ...]
    groups: tuple[GroupContents, ...]
    skipped: tuple[GroupTotal, ...]

    def to_json(self) -> dict[str, object]:
        """As JSON values; `files` are those of these ranks, with their bytes."""
        ranks = sorted(self.written + self.kept)
        return {
            "directory": str(self.directory),
            "written": list(self.written),
            "kept": list(self.kept),
            "files": {rank_file(rank): self.manifest.shards[rank_file(rank)] for rank in ranks},
            "classes": [group.to_json() for group in self.groups],
            "skipped": [total.to_json() for total in self.skipped],
            "notice": self.manifest.settings.notice,
        }


@collection_paused()
def shard_checkpoint(
    inventory: Inventory,
    directory: str | Path,
    layout: ParallelLayout,
    ranks: Iterable[int] | None = None,
    weight_layout: str = "canonical",
    digest: DigestAlgorithm = DigestAlgorithm.XXH3_128,
    progress: Progress | None = None,
    threads: int | None = None,
) -> ShardReport:
    """Write the file of each rank, `config.json` and `manifest.json` into a directory.

    Complete rank files appear together at the end, the manifest after them. Until then the work stands in a directory
    `.v41-partial` inside; a run that was killed goes on from there when it is started again, and ends with the same
    bytes. Ranks can be added to a directory later; those that stand there complete are kept.

    Args:
        directory: new, empty, or with shards of the same checkpoint and settings.
        ranks: the ranks to write; all by default.
        weight_layout: the byte layout, a name of `v41_loader.layouts`.
        progress: called from this thread with (bytes written since the last call, bytes that the run writes).
        threads: threads that read and write; two per processor by default, at most `MAX_THREADS`.

    Raises:
        LayoutError, ShardingError: the layout does not fit the config, or there is no rank to write.
        OutputConflictError: `directory` holds something else, or another run writes to it.
        DiskFullError, OutputWriteError: it does not take the bytes. Partial files stay for another run.
        FileReadError: the checkpoint does not give its bytes. Partial files stay for another run.
        SourceChangedError: the checkpoint is not what was checked, or changes meanwhile. Partial files are removed.
        ScaleNanError, NonFiniteWeightError: a scale or another stored number is infinite or NaN.
        DigestMismatchError: the checkpoint's bytes are not those that other ranks in `directory` were made from.
    """
    asked = checked_ranks(inventory.config, layout, ranks)
    thread_total = thread_count(threads)
    byte_layout = get_layout(weight_layout)
    config_json = _config_json(inventory)
    settings = ShardSettings(
        rules_version=RULES_VERSION,
        tp=layout.tp,
        dp=layout.dp,
        weight_layout=WeightLayoutId(name=byte_layout.name, version=byte_layout.version),
        digest=digest,
        config=digest_of(config_json, digest),
        notice=inventory.notice,
    )
    sources = _source_states(inventory)
    contents = rank_contents(inventory.config, layout, asked, byte_layout)
    with output_directory(Path(directory)) as output:
        manifest = output.manifest
        if manifest is not None:
            _require_same(manifest, settings, sources, output.path)
        kept = tuple(rank for rank in asked if output.holds(rank, contents))
        missing = tuple(rank for rank in asked if rank not in kept)
        groups = contents.groups()
        if missing:
            contents = rank_contents(inventory.config, layout, missing, byte_layout) if kept else contents
            run = RunIdentity(settings=settings, sources=sources, ranks=missing)
            copies = tensor_copies(inventory, contents)
            writer = RankFileWriter(
                inventory, output, contents, copies, run,
                thread_total, progress or (lambda *_: None),
            )  # fmt: skip
            try:
                digests = writer.write()
                manifest = _manifest(manifest, run, contents, digests)
            except (SourceChangedError, DigestMismatchError):
                output.discard()
                raise
            output.complete(config_json, manifest, missing)
        else:
            output.restore_config(config_json)
            output.discard_completed()
        assert manifest is not None
        return ShardReport(output.path, manifest, missing, kept, groups, skipped_groups(inventory.config))


def _config_json(inventory: Inventory) -> bytes:
    """The checkpoint's own `config.json`, byte by byte; where the config was given, that in the released form."""
    if inventory.config_file is None:
        return json.dumps(inventory.config.to_released_json(), indent=2).encode()
    with reopen_source(inventory.config_file) as fd:
        return read_span(fd, inventory.config_file, 0, inventory.config_file.nbytes)


def _source_states(inventory: Inventory) -> dict[str, SourceState]:
    """The files that hold tensors of text inference, as they were checked."""
    files = {stored.file for stored in inventory.tensors.values() if not stored.expected.skipped}
    states = {}
    for name in sorted(files):
        source = inventory.files[name]
        states[name] = SourceState(nbytes=source.nbytes, modified_ns=source.modified_ns)
    return states


def _require_same(manifest: Manifest, settings: ShardSettings, sources: dict[str, SourceState], path: Path) -> None:
    if found := manifest.settings.difference(settings):
        raise OutputConflictError(f"shards in {path}", found, str(settings.difference(manifest.settings)))
    if changed := {file for file, _ in manifest.sources.items() ^ sources.items()}:
        raise OutputConflictError(f"shards in {path}", sorted(changed), "source files unchanged since they were made")


def _manifest(
    earlier: Manifest | None, run: RunIdentity, contents: RankContents, digests: Mapping[str, PartDigests]
) -> Manifest:
    """The manifest of the directory once this run's files are in it."""
    tensors = {}
    for name, parts_of in contents.parts_of.items():
        known = earlier.tensors.get(name) if earlier else None
        tensors[name] = _joined(name, known, digests.get(name), parts_of)
    shards = dict(earlier.shards if earlier else {}) | {rank_file(r): contents.nbytes(r) for r in run.ranks}
    return Manifest(
        manifest_version=MANIFEST_VERSION,
        settings=run.settings,
        sources=run.sources,
        shards=dict(sorted(shards.items())),
        tensors=tensors,
    )


def _joined(name: str, known: PartDigests | None, new: PartDigests | None, parts_of: int) -> PartDigests:
    if known is None or new is None:
        return known or new or PartDigests(source=(None,) * parts_of)

    def join(one: tuple[str | None, ...] | None, other: tuple[str | None, ...] | None) -> tuple[str | None, ...] | None:
        if one is None or other is None:
            return one or other
        for before, now in zip(one, other, strict=True):
            if None not in (before, now) and before != now:
                raise DigestMismatchError(f"{name} in the checkpoint", now, f"{before}, as {MANIFEST_FILE} states")
        return tuple(before or now for before, now in zip(one, other, strict=True))

    source = join(known.source, new.source)
    assert source is not None
    return PartDigests(source=source, stored=join(known.stored, new.stored))
