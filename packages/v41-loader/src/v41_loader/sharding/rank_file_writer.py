"""Fills the partial files of ranks from the checkpoint: threads, the journal, and what an earlier run left."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

from v41_loader.bounded_jobs import Job, run_jobs
from v41_loader.inventory import Inventory
from v41_loader.sharding.journal import Journal, RunIdentity
from v41_loader.sharding.manifest import PartDigests
from v41_loader.sharding.output_directory import OutputDirectory
from v41_loader.sharding.output_files import open_output, write_errors
from v41_loader.sharding.part_blocks import BlockBuffers
from v41_loader.sharding.rank_contents import RankContents, rank_file
from v41_loader.sharding.tensor_copy import RankOutput, TensorCopy, neighbours
from v41_loader.source_files import SourceFile, reopen_source, require_unchanged

MEMORY_BUDGET = 128 << 20
"""Bytes that tensors under way may need together; a tensor that a layout must see whole may need more, alone."""

Progress = Callable[[int, int], object]
"""Called with (bytes since the last call, bytes of the whole run)."""


@dataclass(frozen=True)
class RankFileWriter:
    """One run: from a checkpoint, through `copies`, into the partial files of `run.ranks`."""

    inventory: Inventory
    output: OutputDirectory
    contents: RankContents
    copies: tuple[TensorCopy, ...]
    run: RunIdentity
    threads: int
    progress: Progress

    def write(self) -> Mapping[str, PartDigests]:
        """Bring the files to their final bytes and onto the disk: the digests by tensor.

        Raises:
            DiskFullError, SourceChangedError, ...: as `TensorCopy.copy`.
            OutputConflictError: as `Journal`.
        """
        output, ranks = self.output, self.run.ranks
        output.begin(ranks)
        output.require_room({rank: self.contents.nbytes(rank) for rank in ranks})
        digests: dict[str, PartDigests] = {}
        written_bytes = {copy.stored.expected.name: copy.written_bytes for copy in self.copies}
        total = sum(written_bytes.values())
        with ExitStack() as files:
            journal = Journal(output.journal, self.run)
            files.callback(journal.close)
            outputs = {rank: self._opened(rank, files) for rank in ranks}
            sources: list[tuple[int, SourceFile]] = []
            jobs = self._jobs(files, sources, outputs, journal)
            with closing(run_jobs(jobs, self.threads, MEMORY_BUDGET)) as results:
                for copied in results:
                    digests |= copied
                    self.progress(sum(written_bytes[name] for name in copied), total)
            for fd, source in sources:
                require_unchanged(fd, source)
            for rank, target in outputs.items():
                with write_errors(rank_file(rank)):
                    os.fsync(target.fd)
        return digests

    def _opened(self, rank: int, files: ExitStack) -> RankOutput:
        path = self.output.partial / rank_file(rank)
        fd = open_output(path, self.contents.headers[rank], self.contents.nbytes(rank))
        files.callback(os.close, fd)
        return RankOutput(fd, self.contents.entries[rank])

    def _jobs(
        self,
        files: ExitStack,
        sources: list[tuple[int, SourceFile]],
        outputs: Mapping[int, RankOutput],
        journal: Journal,
    ) -> Iterator[Job[dict[str, PartDigests]]]:
        """One job per run of neighbours, in file order; each source file is opened once, when its first one comes."""
        buffers = BlockBuffers()
        for copies in neighbours(self.copies):
            source = self.inventory.files[copies[0].stored.file]
            if not sources or sources[-1][1] is not source:
                sources.append((files.enter_context(reopen_source(source)), source))
            fd, _ = sources[-1]
            cost = max(copy.working_memory for copy in copies)
            yield Job(partial(self._copied, copies, fd, source, outputs, journal, buffers), cost)

    def _copied(
        self,
        copies: Sequence[TensorCopy],
        fd: int,
        source: SourceFile,
        outputs: Mapping[int, RankOutput],
        journal: Journal,
        buffers: BlockBuffers,
    ) -> dict[str, PartDigests]:
        algorithm = self.run.settings.digest
        digests: dict[str, PartDigests] = {}
        for copy in copies:
            name = copy.stored.expected.name
            earlier = journal.records.get(name)
            if earlier is not None and copy.stands_in(outputs, earlier, algorithm, buffers):
                digests[name] = earlier
            else:
                digests[name] = copy.copy(fd, source, outputs, algorithm, buffers)
        journal.append({name: now for name, now in digests.items() if journal.records.get(name) != now})
        return digests
