"""Reading the tensors of a checked checkpoint, whole or in part.

Byte ranges are read straight into the tensor that is returned. Slices of `safetensors.safe_open` would go through a
mapping of the file: several times slower (the benchmark prints the ratio), and a crash, not an error, where a file
shrinks while it is read.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import TracebackType

import torch

from v41_config.model_config import ModelConfig
from v41_config.parallel_layout import ParallelLayout
from v41_loader.errors import ShardingError, UnknownTensorError
from v41_loader.finite_codes import require_finite
from v41_loader.inventory import Inventory, read_inventory
from v41_loader.partition import rank_part
from v41_loader.rank_loading import RankRead
from v41_loader.rules import DTYPE_BYTES
from v41_loader.source_files import reopen_source, require_unchanged
from v41_loader.tensor_ranges import BAND_BYTES, read_range
from v41_loader.torch_dtypes import TORCH_DTYPES


def open_checkpoint(
    directory: str | Path,
    config: ModelConfig | None = None,
    without_engram: bool = False,
    allowed_root: str | Path | None = None,
) -> Checkpoint:
    """Check a released-format directory and open it for reading; arguments and errors as `read_inventory`."""
    return Checkpoint(read_inventory(directory, config, without_engram, allowed_root))


class Checkpoint:
    """The tensors of a checked checkpoint by their released names.

    Tensors come in their stored dtypes (BF16, F32, `float8_e4m3fn`, `float8_e8m0fnu`, packed FP4 as `int8`), on the
    CPU, contiguous, in memory of their own. Files are opened when first read and closed with the checkpoint, which
    threads may share.
    """

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self._files = ExitStack()
        self._descriptors: dict[str, int] = {}
        self._opening = threading.Lock()

    @property
    def config(self) -> ModelConfig:
        return self.inventory.config

    @property
    def notice(self) -> str | None:
        """What must be said of every result, as `Inventory.notice`."""
        return self.inventory.notice

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors of text inference; skipped groups are left out, but can be read by name."""
        return tuple(name for name, stored in self.inventory.tensors.items() if not stored.expected.skipped)

    def tensor(self, name: str) -> torch.Tensor:
        """One whole tensor; errors as `part`."""
        return self.part(name)

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Several whole tensors; errors as `part`."""
        return {name: self.part(name) for name in names}

    def rank_reads(self, layout: ParallelLayout, rank: int) -> list[RankRead]:
        """What a rank holds, in file order, for `load_rank`.

        Raises:
            LayoutError, ShardingError: as `rank_part`.
        """
        layout.check(self.config)
        layout.tp_rank(rank)  # raises where the layout has no such rank
        reads = []
        for name in self.names:
            stored = self.inventory.tensors[name]
            part = rank_part(stored.expected, self.config, layout, rank)
            if part is None:
                continue
            cost = math.prod(part.shape) * DTYPE_BYTES[stored.expected.dtype] + (BAND_BYTES if part.axis else 0)
            read = partial(self.part, name, part.axis, part.start, part.stop)
            reads.append((stored.file, stored.entry.begin, RankRead(name, cost, read)))
        return [item for *_, item in sorted(reads, key=itemgetter(0, 1))]

    def part(self, name: str, axis: int | None = None, start: int = 0, stop: int = 0) -> torch.Tensor:
        """Stored items `[start, stop)` of a tensor along `axis`, or all of it; no more than these are held in memory.

        Raises:
            UnknownTensorError: no tensor of that name.
            ShardingError: a range outside the tensor.
            SourceChangedError: the file is not the one that was checked.
            FileReadError: its bytes cannot be read.
            ScaleNanError: a scale among them is E8M0 code 255.
            NonFiniteWeightError: another item among them is infinite or NaN.
        """
        stored = self.inventory.tensors.get(name)
        if stored is None:
            raise UnknownTensorError(str(self.inventory.directory), name, "a tensor of this checkpoint")
        shape = list(stored.expected.shape)
        if axis is None:
            axis, start, stop = 0, 0, shape[0]
        elif not (0 <= axis < len(shape) and 0 <= start <= stop <= shape[axis]):
            raise ShardingError(name, f"[{start}, {stop}) along dimension {axis}", f"a range inside {shape}")
        fd, source = self._opened(stored.file), self.inventory.files[stored.file]
        data = read_range(fd, source, stored.entry, axis, start, stop)
        require_unchanged(fd, source)
        shape[axis] = stop - start
        origin = [0] * len(shape)
        origin[axis] = start
        require_finite(data, stored.expected.dtype, name, stored.file, tuple(shape), tuple(origin))
        return torch.from_numpy(data).view(TORCH_DTYPES[stored.expected.dtype]).reshape(shape)

    def close(self) -> None:
        """Close the files."""
        self._descriptors.clear()
        self._files.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self, file: str) -> int:
        with self._opening:
            if file not in self._descriptors:
                self._descriptors[file] = self._files.enter_context(reopen_source(self.inventory.files[file]))
            return self._descriptors[file]
