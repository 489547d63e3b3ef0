"""The directory that shards appear in: one run at a time, partial files apart, finished ones by rename."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from v41_loader.errors import CheckpointError, DiskFullError, OutputConflictError, OutputWriteError
from v41_loader.index import MANIFEST_FILE
from v41_loader.inventory import CONFIG_FILE
from v41_loader.sharding.manifest import Manifest, read_manifest
from v41_loader.sharding.output_files import replace_document, sync_directory, write_errors
from v41_loader.sharding.rank_contents import RankContents, rank_file
from v41_loader.source_files import open_source, read_document, read_span

PARTIAL_DIRECTORY = ".v41-partial"
JOURNAL_FILE = "journal.jsonl"
RANK_FILES = re.compile(r"rank-\d{2,}\.safetensors", re.ASCII)


@dataclass(frozen=True)
class OutputDirectory:
    """A locked output directory. `manifest` says what earlier runs completed."""

    path: Path
    manifest: Manifest | None

    @property
    def partial(self) -> Path:
        """Where files stand until they are complete."""
        return self.path / PARTIAL_DIRECTORY

    @property
    def journal(self) -> Path:
        """The journal of an interrupted run."""
        return self.partial / JOURNAL_FILE

    def holds(self, rank: int, contents: RankContents) -> bool:
        """Whether a rank's finished file is there; its header and size are looked at, `verify` looks at the rest."""
        path = self.path / rank_file(rank)
        if self.manifest is None or path.name not in self.manifest.shards:
            return False
        try:
            with open_source(self.path, path.name) as (fd, source):
                header = contents.headers[rank]
                return source.nbytes == contents.nbytes(rank) and read_span(fd, source, 0, len(header)) == header
        except CheckpointError:
            return False

    def begin(self, ranks: tuple[int, ...]) -> None:
        """Make place for partial files. Rank files that were renamed before a kill, but are in no manifest, go back."""
        if self.partial.is_symlink():
            raise OutputConflictError(str(self.partial), "a link", "no link, or nothing")
        with write_errors(str(self.partial)):
            self.partial.mkdir(exist_ok=True)
            for rank in ranks:
                name = rank_file(rank)
                if os.path.lexists(self.path / name) and not (self.partial / name).exists():
                    os.replace(self.path / name, self.partial / name)

    def require_room(self, sizes: Mapping[int, int]) -> None:
        """Raise `DiskFullError` where the rest of the rank files would not fit."""
        needed = 0
        for rank, nbytes in sizes.items():
            path = self.partial / rank_file(rank)
            needed += max(0, nbytes - (path.stat().st_blocks * 512 if path.exists() else 0))
        free = shutil.disk_usage(self.partial).free
        if needed > free:
            raise DiskFullError(str(self.path), f"{free:,} bytes free", f"room for {needed:,} bytes more")

    def discard(self) -> None:
        """Remove everything partial."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def discard_completed(self) -> None:
        """Remove what a run left that was killed when its manifest was written; an interrupted run has rank files."""
        if self.partial.exists() and not any(RANK_FILES.fullmatch(entry.name) for entry in self.partial.iterdir()):
            self.discard()

    def restore_config(self, config_json: bytes) -> None:
        """Write `config.json` anew where it is gone or has other bytes: shards cannot be opened without it.

        Raises:
            DiskFullError, OutputWriteError: it cannot be written.
        """
        try:
            if read_document(self.path, CONFIG_FILE) == config_json:
                return
        except CheckpointError:
            pass
        self.begin(())
        replace_document(self.path / CONFIG_FILE, self.partial / CONFIG_FILE, config_json)

    def complete(self, config_json: bytes, manifest: Manifest, ranks: tuple[int, ...]) -> None:
        """Let the finished rank files appear, and then, all at once, the manifest that vouches for them.

        Raises:
            DiskFullError, OutputWriteError: the directory has no new manifest.
        """
        replace_document(self.path / CONFIG_FILE, self.partial / CONFIG_FILE, config_json)
        with write_errors(str(self.path)):
            for rank in ranks:
                os.replace(self.partial / rank_file(rank), self.path / rank_file(rank))
            sync_directory(self.path)
        replace_document(self.path / MANIFEST_FILE, self.partial / MANIFEST_FILE, manifest.encode())
        self.discard()


@contextmanager
def output_directory(path: Path) -> Iterator[OutputDirectory]:
    """Make or take a directory for shards, for this process alone until the context ends.

    Raises:
        OutputConflictError: something else stands in it, or another process writes to it.
        OutputWriteError: it cannot be made.
    """
    with write_errors(str(path)):
        path.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            with write_errors(str(path)):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OutputWriteError as error:
            if not isinstance(error.__cause__, BlockingIOError):
                raise
            raise OutputConflictError(str(path), "another run that writes to it", "one run at a time") from None
        yield OutputDirectory(path, _manifest_of(path))
    finally:
        os.close(fd)


def _manifest_of(path: Path) -> Manifest | None:
    """The manifest of a directory that holds nothing but what runs leave there."""
    names = {entry.name for entry in path.iterdir()}
    manifest = read_manifest(path) if MANIFEST_FILE in names else None
    explained = {PARTIAL_DIRECTORY}
    if manifest is not None or PARTIAL_DIRECTORY in names:
        explained |= {MANIFEST_FILE, CONFIG_FILE}
    if manifest is not None:
        explained |= set(manifest.shards)
    if PARTIAL_DIRECTORY in names:  # a kill may have come between the renames and the manifest
        explained |= {name for name in names if RANK_FILES.fullmatch(name)}
    if foreign := names - explained:
        raise OutputConflictError(str(path), sorted(foreign), "an empty or new directory, or one with shards")
    return manifest
