"""Copies one tensor's parts from the checkpoint into rank files: read once, digested, written to every rank.

The bytes pass through a buffer that stays in a core's cache. Letting the kernel copy (`copy_file_range`, `sendfile`)
would not spare that: the digest must see the bytes, and a second read of them costs more than the one through the
buffer does (the benchmark prints both) and might find other bytes than those that were copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from v41_loader.digests import DigestAlgorithm, new_digest
from v41_loader.finite_codes import require_finite
from v41_loader.header_entries import TensorEntry
from v41_loader.inventory import Inventory, StoredTensor
from v41_loader.rules import DTYPE_BYTES
from v41_loader.sharding.manifest import PartDigests
from v41_loader.sharding.output_files import read_back, start_flush, write_at, write_errors
from v41_loader.sharding.part_blocks import BLOCK_BYTES, Block, BlockBuffers, part_blocks
from v41_loader.sharding.rank_contents import RankContents, StoredPart, rank_file
from v41_loader.source_files import SourceFile, require_unchanged

_RUN_BYTES = 64 << 20
"""Enough that the kernel sees a file that is read from front to back: readers that take turns at every tensor cost
three times the processor time, where the file is not in memory. And little to do again after a kill."""

_RUN_TENSORS = 32
"""The same, where tensors are small."""


@dataclass(frozen=True)
class RankOutput:
    """An open rank file and where each tensor stands in it."""

    fd: int
    entries: Mapping[str, TensorEntry]


class PartDigester:
    """Digests of a tensor's parts while their blocks pass by: of the checkpoint's bytes, or of the rank files'."""

    def __init__(self, parts: Iterable[StoredPart], parts_of: int, algorithm: DigestAlgorithm) -> None:
        self._parts_of = parts_of
        self._digests = {part.number: new_digest(algorithm) for part in parts}

    def add(self, part: StoredPart, data: memoryview) -> None:
        """The next bytes of a part."""
        self._digests[part.number].update(data)

    def digests(self) -> tuple[str | None, ...]:
        """The digests in the order of the tensor's parts; None for parts that did not pass."""
        return tuple(self._digests[n].hexdigest() if n in self._digests else None for n in range(self._parts_of))


@dataclass(frozen=True, slots=True)
class TensorCopy:
    """One tensor and those of its parts that the ranks of a run hold."""

    stored: StoredTensor
    parts: tuple[StoredPart, ...]
    parts_of: int

    @property
    def read_bytes(self) -> int:
        """Bytes of the checkpoint."""
        return sum(part.source_nbytes for part in self.parts)

    @property
    def written_bytes(self) -> int:
        """Bytes that go into rank files, each rank's own copy counted."""
        return sum(part.nbytes * len(part.ranks) for part in self.parts)

    @property
    def working_memory(self) -> int:
        """Bytes that copying needs while it lasts."""
        memory = self.parts[0].working_memory
        if self.parts[0].part.axis == 1 and self.parts[0].transform is not None:
            memory += self.stored.entry.nbytes  # whole rows, of which the parts are pieces
        return memory

    def copy(
        self,
        fd: int,
        source: SourceFile,
        outputs: Mapping[int, RankOutput],
        algorithm: DigestAlgorithm,
        buffers: BlockBuffers,
    ) -> PartDigests:
        """Read every part once and write it to each rank that holds it.

        Raises:
            ScaleNanError, NonFiniteWeightError: a scale or another stored number is infinite or NaN.
            SourceChangedError, FileReadError: the checkpoint cannot be read as it was checked.
            DiskFullError, OutputWriteError: a rank file does not take the bytes.
        """
        read = PartDigester(self.parts, self.parts_of, algorithm)
        written = PartDigester(self.parts, self.parts_of, algorithm)
        positions = {part.number: 0 for part in self.parts}
        for part, block in self._blocks(fd, source, buffers):
            data = block.reshape(-1).data
            read.add(part, data)
            if part.transform is not None:
                data = part.transform.apply(block).reshape(-1).data
                written.add(part, data)
            for rank in part.ranks:
                output = outputs[rank]
                with write_errors(rank_file(rank)):
                    write_at(output.fd, data, output.entries[part.tensor.name].begin + positions[part.number])
            positions[part.number] += len(data)
        for part in self.parts:
            for rank in part.ranks:
                entry = outputs[rank].entries[part.tensor.name]
                with write_errors(rank_file(rank)):
                    start_flush(outputs[rank].fd, entry.begin, entry.end)
        transformed = self.parts[0].transform is not None
        return PartDigests(source=read.digests(), stored=written.digests() if transformed else None)

    def source_digests(
        self, fd: int, source: SourceFile, algorithm: DigestAlgorithm, buffers: BlockBuffers
    ) -> tuple[str | None, ...]:
        """Read every part once, for its digest; errors as `copy`."""
        read = PartDigester(self.parts, self.parts_of, algorithm)
        for part, block in self._blocks(fd, source, buffers):
            read.add(part, block.reshape(-1).data)
        return read.digests()

    def stands_in(
        self,
        outputs: Mapping[int, RankOutput],
        recorded: PartDigests,
        algorithm: DigestAlgorithm,
        buffers: BlockBuffers,
    ) -> bool:
        """Whether the rank files hold the tensor as an earlier run recorded it."""
        if {len(recorded.source), len(recorded.in_rank_files)} != {self.parts_of}:
            return False
        for part in self.parts:
            for rank in part.ranks:
                output = outputs[rank]
                entry = output.entries[part.tensor.name]
                digest = new_digest(algorithm)
                for begin in range(entry.begin, entry.end, BLOCK_BYTES):
                    block = buffers.block("read", 1, min(BLOCK_BYTES, entry.end - begin)).reshape(-1).data
                    if not read_back(output.fd, begin, block):
                        return False
                    digest.update(block)
                if digest.hexdigest() != recorded.in_rank_files[part.number]:
                    return False
        return True

    def _blocks(self, fd: int, source: SourceFile, buffers: BlockBuffers) -> Iterator[tuple[StoredPart, Block]]:
        transform = self.parts[0].transform  # the parts of a tensor are equally large
        blocks = part_blocks(
            fd, source, self.stored.entry, [part.part for part in self.parts], buffers,
            transform.rows_per_block if transform else None,
        )  # fmt: skip
        for number, row, block in blocks:
            part = self.parts[number]
            self._require_finite(part, row, block, source.name)
            yield part, block
        require_unchanged(fd, source)

    def _require_finite(self, part: StoredPart, row: int, block: Block, file: str) -> None:
        tensor = part.tensor
        row_items = block.shape[1] // DTYPE_BYTES[tensor.dtype]
        origin = (row, part.part.start) if part.part.axis == 1 else (row + part.part.start, 0)
        rank = len(tensor.shape)
        require_finite(block, tensor.dtype, tensor.name, file, (len(block), row_items)[:rank], origin[:rank])


def tensor_copies(inventory: Inventory, contents: RankContents) -> tuple[TensorCopy, ...]:
    """What ranks need of a checkpoint, in file order."""
    order = {file: number for number, file in enumerate(inventory.files)}
    copies = [
        TensorCopy(inventory.tensors[name], parts, contents.parts_of[name])
        for name, parts in contents.parts.items()
        if parts
    ]
    return tuple(sorted(copies, key=lambda copy: (order[copy.stored.file], copy.stored.entry.begin)))


def neighbours(copies: Iterable[TensorCopy]) -> Iterator[list[TensorCopy]]:
    """`copies` as they come, those of one file together, up to `_RUN_BYTES`: what one thread reads on its own."""
    run: list[TensorCopy] = []
    nbytes = 0
    for copy in copies:
        if run and (run[0].stored.file != copy.stored.file or nbytes >= _RUN_BYTES or len(run) == _RUN_TENSORS):
            yield run
            run, nbytes = [], 0
        run.append(copy)
        nbytes += copy.read_bytes
    if run:
        yield run
