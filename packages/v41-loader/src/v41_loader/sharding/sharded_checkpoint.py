"""Reading the tensors of a sharded directory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from v41_config.model_config import ModelConfig
from v41_config.parallel_layout import ParallelLayout
from v41_loader.digests import new_digest
from v41_loader.errors import DigestMismatchError, MissingRankError, ShardingError, UnknownTensorError
from v41_loader.finite_codes import require_finite
from v41_loader.header_entries import TensorEntry
from v41_loader.index import MANIFEST_FILE
from v41_loader.rank_loading import RankRead
from v41_loader.sharding.rank_contents import StoredPart, rank_file
from v41_loader.sharding.shard_inventory import ShardInventory, read_shard_inventory
from v41_loader.source_files import read_into, reopen_source, require_unchanged
from v41_loader.torch_dtypes import TORCH_DTYPES


def open_shards(directory: str | Path, weight_layout: str = "canonical") -> ShardedCheckpoint:
    """Check a directory that `shard_checkpoint` completed and open it for reading.

    The model's Torch code takes the canonical layout, the released orientation and bytes; who reads another names it.
    Errors as `read_shard_inventory`.
    """
    return ShardedCheckpoint(read_shard_inventory(directory, weight_layout=weight_layout))


class ShardedCheckpoint:
    """The tensors of a sharded directory, by rank, under the checkpoint's global names.

    Tensors come as `Checkpoint` gives them: in their stored dtypes, on the CPU, contiguous, in memory of their own.
    Every one is compared with the manifest's digest of it. Files are opened when first read. Threads may share it.
    """

    def __init__(self, inventory: ShardInventory) -> None:
        self.inventory = inventory
        self._files = ExitStack()
        self._descriptors: dict[int, int] = {}
        self._opening = threading.Lock()

    @property
    def config(self) -> ModelConfig:
        return self.inventory.config

    @property
    def layout(self) -> ParallelLayout:
        """What the directory was sharded for."""
        return self.inventory.layout

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose files the directory has."""
        return self.inventory.ranks

    @property
    def notice(self) -> str | None:
        """What must be said of every result, as `Inventory.notice`."""
        return self.inventory.manifest.settings.notice

    def names(self, rank: int) -> tuple[str, ...]:
        """What a rank holds, in file order.

        Raises:
            MissingRankError: the directory does not have the rank.
        """
        return tuple(self._entries(rank))

    def rank_reads(self, layout: ParallelLayout, rank: int) -> list[RankRead]:
        """All that a rank holds, in file order, for `load_rank`.

        Raises:
            ShardingError: the directory was sharded for another layout.
            MissingRankError: it does not have the rank.
        """
        if layout != self.layout:
            raise ShardingError(f"shards in {self.inventory.directory}", self.layout, f"{layout}, as asked for")
        return [
            RankRead(name, entry.nbytes, partial(self.tensor, rank, name))
            for name, entry in self._entries(rank).items()
        ]

    def rank_tensors(self, rank: int) -> dict[str, torch.Tensor]:
        """All that a rank holds; errors as `tensor`."""
        return dict(self.iterate(rank))

    def iterate(self, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
        """All that a rank holds, one tensor after the other in file order; errors as `tensor`."""
        for name in self.names(rank):
            yield name, self.tensor(rank, name)

    def tensor(self, rank: int, name: str) -> torch.Tensor:
        """A rank's part of a tensor.

        Raises:
            MissingRankError: the directory does not have the rank.
            UnknownTensorError: the rank holds no tensor of that name.
            SourceChangedError: the file is not the one that was checked.
            FileReadError: its bytes cannot be read.
            DigestMismatchError: they are not those that were written.
            ScaleNanError: a scale among them is E8M0 code 255.
            NonFiniteWeightError: another item among them is infinite or NaN.
        """
        entry = self._entries(rank).get(name)
        if entry is None:
            raise UnknownTensorError(rank_file(rank), name, f"a tensor that rank {rank} holds")
        source = self.inventory.files[rank]
        fd = self._opened(rank)
        data = np.empty(entry.nbytes, np.uint8)
        read_into(fd, source, entry.begin, data.data)
        require_unchanged(fd, source)
        self._require_digest(rank, self._part(rank, name), data.data)
        require_finite(data, entry.dtype, name, source.name, entry.shape)
        return torch.from_numpy(data).view(TORCH_DTYPES[entry.dtype]).reshape(entry.shape)

    def close(self) -> None:
        """Close the files."""
        self._descriptors.clear()
        self._files.close()

    def __enter__(self) -> ShardedCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self, rank: int) -> int:
        with self._opening:
            if rank not in self._descriptors:
                self._descriptors[rank] = self._files.enter_context(reopen_source(self.inventory.files[rank]))
            return self._descriptors[rank]

    def _entries(self, rank: int) -> Mapping[str, TensorEntry]:
        if rank not in self.inventory.files:
            raise MissingRankError(str(self.inventory.directory), f"ranks {list(self.ranks)}", f"rank {rank}")
        return self.inventory.contents.entries[rank]

    def _part(self, rank: int, name: str) -> StoredPart:
        return next(part for part in self.inventory.contents.parts[name] if rank in part.ranks)

    def _require_digest(self, rank: int, part: StoredPart, data: memoryview) -> None:
        manifest = self.inventory.manifest
        stated = manifest.tensors[part.tensor.name].in_rank_files[part.number]
        digest = new_digest(manifest.settings.digest)
        digest.update(data)
        if digest.hexdigest() != stated:
            raise DigestMismatchError(
                f"{part.tensor.name} in {rank_file(rank)}", digest.hexdigest(), f"{stated}, as {MANIFEST_FILE} states"
            )
