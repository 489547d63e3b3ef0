"""The journal of a run: which tensors are in the partial rank files, so that a killed run can go on.

It is written after the bytes, and believed only together with them: a run that goes on compares the digest of what
stands in the files with the journal's before it keeps a tensor. So neither a kill nor a loss of power needs a flush.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from v41_loader.errors import OutputConflictError
from v41_loader.sharding.manifest import PartDigests, ShardSettings, SourceState
from v41_loader.sharding.output_files import write_errors


class RunIdentity(BaseModel):
    """What a run does: another run may only go on with its partial files if all of this is the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: ShardSettings
    sources: dict[str, SourceState]
    ranks: tuple[int, ...] = Field(strict=False)


class JournalRecord(BaseModel):
    """A tensor that stands in the partial files of all ranks that hold it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor: str
    digests: PartDigests


class Journal:
    """An open journal; `records` are those of earlier runs."""

    def __init__(self, path: Path, run: RunIdentity) -> None:
        """Go on with the journal at `path`, or begin one: where there is none, and where the source has changed.

        Raises:
            OutputConflictError: it belongs to a run with other settings or ranks.
            DiskFullError, OutputWriteError: it cannot be written.
        """
        self._path = path
        self._writing = threading.Lock()
        with write_errors(str(path)):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            self.records, kept = _read(path, run)
            with write_errors(str(path)):
                os.ftruncate(self._fd, kept)
                os.lseek(self._fd, kept, os.SEEK_SET)
            if not kept:
                self._write(run)
        except BaseException:
            self.close()
            raise

    def append(self, digests: Mapping[str, PartDigests]) -> None:
        """Note that the bytes of tensors are in the files; threads may do so at once."""
        self._write(*(JournalRecord(tensor=tensor, digests=of_tensor) for tensor, of_tensor in digests.items()))

    def close(self) -> None:
        """Close the file; it stays."""
        os.close(self._fd)

    def _write(self, *lines: BaseModel) -> None:
        data = b"".join(line.model_dump_json(exclude_defaults=True).encode() + b"\n" for line in lines)
        with self._writing, write_errors(str(self._path)):
            while data:
                data = data[os.write(self._fd, data) :]


def _read(path: Path, run: RunIdentity) -> tuple[Mapping[str, PartDigests], int]:
    """The records of an existing journal of the same run, and the bytes that they and the first line take.

    A kill may have cut the last line short, a loss of power may have left anything: what follows the first line that
    cannot be read does not count.
    """
    lines = path.read_bytes().splitlines(keepends=True)
    records: dict[str, PartDigests] = {}
    kept = 0
    try:
        for number, line in enumerate(lines):
            if not line.endswith(b"\n"):
                break
            if number:
                record = JournalRecord.model_validate_json(line)
                records[record.tensor] = record.digests
            elif not _continues(RunIdentity.model_validate_json(line), run, path):
                break
            kept += len(line)
    except ValidationError:
        pass
    return records, kept


def _continues(earlier: RunIdentity, run: RunIdentity, path: Path) -> bool:
    """Whether a run goes on with the files of an earlier one; False where the source has changed in between."""
    where, give_up = f"interrupted run in {path.parent}", f"(or remove {path.parent} to give that run up)"
    if found := earlier.settings.difference(run.settings):
        raise OutputConflictError(where, found, f"{run.settings.difference(earlier.settings)} {give_up}")
    if earlier.ranks != run.ranks:
        raise OutputConflictError(where, {"ranks": list(earlier.ranks)}, f"ranks {list(run.ranks)} {give_up}")
    return earlier.sources == run.sources
