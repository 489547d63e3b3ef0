"""Proves that shards are their source: nothing missing, nothing twice, every byte as it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from v41_loader.bounded_jobs import Job, run_jobs, thread_count
from v41_loader.digests import new_digest
from v41_loader.errors import DigestMismatchError, ManifestError, MissingRankError, WeightLayoutError
from v41_loader.finite_codes import require_finite
from v41_loader.garbage_collection import collection_paused
from v41_loader.index import MANIFEST_FILE
from v41_loader.inventory import CONFIG_FILE, GroupTotal, Inventory, skipped_groups
from v41_loader.rules import DTYPE_BYTES
from v41_loader.sharding.coverage import require_scale_pairing, require_union
from v41_loader.sharding.output_directory import RANK_FILES
from v41_loader.sharding.part_blocks import BLOCK_BYTES, BlockBuffers
from v41_loader.sharding.rank_contents import GroupContents, StoredPart
from v41_loader.sharding.rank_file_writer import MEMORY_BUDGET, Progress
from v41_loader.sharding.shard_inventory import ShardInventory, read_shard_inventory
from v41_loader.sharding.tensor_copy import TensorCopy, tensor_copies
from v41_loader.source_files import SourceFile, read_into, reopen_source, require_unchanged


@dataclass(frozen=True)
class VerificationReport:
    """Shards that hold what they should. `union` says whether together they are the whole source, or only some ranks
    were looked at; `source` is the checkpoint that their bytes were compared with, None where only digests were.
    """

    directory: Path
    ranks: tuple[int, ...]
    union: bool
    source: Path | None
    groups: tuple[GroupContents, ...]
    skipped: tuple[GroupTotal, ...]
    notice: str | None

    def to_json(self) -> dict[str, object]:
        """What was proven, as JSON values."""
        return {
            "directory": str(self.directory),
            "ranks": list(self.ranks),
            "union": self.union,
            "source": None if self.source is None else str(self.source),
            "classes": [group.to_json() for group in self.groups],
            "skipped": [total.to_json() for total in self.skipped],
            "notice": self.notice,
        }


@collection_paused()
def verify_shards(
    directory: str | Path,
    source: Inventory | None = None,
    ranks: Iterable[int] | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
) -> VerificationReport:
    """Read shards again and prove that they are the checkpoint they were made from.

    Every rank file holds exactly the tensors that config and layout imply; the parts of each tensor make it up, without
    gap or overlap, once in each TP group (an expert: once); scales stand with their weights and are cut alike; all
    stored numbers are finite; every byte has the digest that it was written with, and, taken back into the released
    form, the digest of the source's bytes. With `source`, the checkpoint is read again and has these digests too.

    Args:
        ranks: look at these alone, and leave the union unproven; by default all ranks of the layout must be there.
        progress: called from this thread with (bytes read since the last call, bytes to be read).
        threads: two per processor by default, at most `MAX_THREADS`.

    Raises:
        MissingRankError, ManifestError, CheckpointError: as `read_shard_inventory`.
        ShardCoverageError: the parts of a tensor are not the tensor.
        ScalePairingError: a scale is not with its weight.
        DigestMismatchError: bytes of a rank file or of the source are not those that were sharded.
        WeightLayoutError: bytes of a rank file are none that the byte layout makes.
        ScaleNanError, NonFiniteWeightError: a scale or another stored number is infinite or NaN.
        SourceChangedError, FileReadError: a file cannot be read as it was checked.
    """
    shards = read_shard_inventory(directory, ranks)
    _require_no_strays(shards)
    if ranks is None:
        for rank in range(shards.layout.world_size):
            if rank not in shards.files:
                expected = f"rank {rank}, unless the ranks to verify are named (--ranks)"
                raise MissingRankError(str(shards.directory), f"ranks {list(shards.ranks)}", expected)
        for parts in shards.contents.parts.values():
            require_union(parts, shards.layout)
    for parts in shards.contents.parts.values():
        require_scale_pairing(parts, shards.contents.parts)
    if source is not None and source.config != shards.config:
        raise DigestMismatchError(f"{CONFIG_FILE} in {source.directory}", "another config", "the config of the shards")
    copies = tensor_copies(source, shards.contents) if source is not None else ()
    _Verification(shards, source, copies).run(thread_count(threads), progress or (lambda *_: None))
    return VerificationReport(
        shards.directory,
        shards.ranks,
        ranks is None,
        source.directory if source is not None else None,
        shards.contents.groups(),
        skipped_groups(shards.config),
        shards.manifest.settings.notice,
    )


def _require_no_strays(shards: ShardInventory) -> None:
    present = {entry.name for entry in shards.directory.iterdir() if RANK_FILES.fullmatch(entry.name)}
    if strays := sorted(present - shards.manifest.shards.keys()):
        raise ManifestError(str(shards.directory), strays, f"only rank files that {MANIFEST_FILE} knows")


@dataclass(frozen=True)
class _Verification:
    """Reads rank files, and the source, against the manifest's digests."""

    shards: ShardInventory
    source: Inventory | None
    copies: tuple[TensorCopy, ...]

    def run(self, threads: int, progress: Progress) -> None:
        total = sum(entry.nbytes for entries in self.shards.contents.entries.values() for entry in entries.values())
        total += sum(copy.read_bytes for copy in self.copies)
        with ExitStack() as files, closing(run_jobs(self._jobs(files), threads, MEMORY_BUDGET)) as read:
            for nbytes in read:
                progress(nbytes, total)

    def _jobs(self, files: ExitStack) -> Iterator[Job[int]]:
        """Rank after rank, then the source, each in file order."""
        buffers = BlockBuffers()
        contents = self.shards.contents
        parts = {
            (rank, name): part for name, held in contents.parts.items() for part in held for rank in part.ranks
        }  # fmt: skip
        for rank, file in self.shards.files.items():
            fd = files.enter_context(reopen_source(file))
            for name in contents.entries[rank]:
                part = parts[rank, name]
                yield Job(partial(self._check_part, fd, file, rank, part, buffers), part.working_memory)
        opened: dict[str, int] = {}
        for copy in self.copies:
            assert self.source is not None
            file = self.source.files[copy.stored.file]
            if file.name not in opened:
                opened[file.name] = files.enter_context(reopen_source(file))
            yield Job(partial(self._check_source, opened[file.name], file, copy, buffers), copy.working_memory)

    def _check_part(self, fd: int, file: SourceFile, rank: int, part: StoredPart, buffers: BlockBuffers) -> int:
        """Compare a rank's part with what was written, and with the source's bytes that it stands for."""
        name, entry = part.tensor.name, self.shards.contents.entries[rank][part.tensor.name]
        algorithm = self.shards.manifest.settings.digest
        stored, original = new_digest(algorithm), new_digest(algorithm)
        # Replicas have the digest of the first one, so only that is taken back.
        transform = part.transform if rank == part.ranks[0] else None
        step = BLOCK_BYTES if transform is None else part.block_nbytes
        for begin in range(entry.begin, entry.end, step):
            block = buffers.block("read", 1, min(step, entry.end - begin)).reshape(-1)
            read_into(fd, file, begin, block.data)
            stored.update(block.data)
            first, count = (nbytes // DTYPE_BYTES[entry.dtype] for nbytes in (begin - entry.begin, block.nbytes))
            require_finite(block, entry.dtype, name, file.name, (count,), (first,))
            if transform is not None:
                released = transform.inverse(block)
                if released is None:
                    expected = f"bytes of the {self.shards.manifest.settings.weight_layout.name} layout"
                    raise WeightLayoutError(f"{name} in {file.name}", "other ones", expected)
                original.update(released.reshape(-1).data)
        require_unchanged(fd, file)
        stated = self.shards.manifest.tensors[name]
        self._require_digest(f"{name} in {file.name}", stored.hexdigest(), stated.in_rank_files[part.number])
        if transform is not None:
            where = f"{name} in {file.name}, in the released form"
            self._require_digest(where, original.hexdigest(), stated.source[part.number])
        return entry.nbytes

    def _check_source(self, fd: int, file: SourceFile, copy: TensorCopy, buffers: BlockBuffers) -> int:
        name = copy.stored.expected.name
        found = copy.source_digests(fd, file, self.shards.manifest.settings.digest, buffers)
        stated = self.shards.manifest.tensors[name].source
        for part in copy.parts:
            where = f"part {part.number} of {name} in {file.path}"
            self._require_digest(where, found[part.number], stated[part.number])
        return copy.read_bytes

    def _require_digest(self, where: str, found: str | None, stated: str | None) -> None:
        if found != stated:
            raise DigestMismatchError(where, found, f"{stated}, as {MANIFEST_FILE} states")
