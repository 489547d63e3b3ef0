"""Reading the tensors of a checked checkpoint, whole or in part, through safetensors."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open

from v41_config.model_config import ModelConfig
from v41_loader.errors import ScaleNanError, TensorReadError, UnknownTensorError
from v41_loader.inventory import Inventory, StoredTensor, read_inventory

_E8M0_NAN = 255


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
    CPU, contiguous, in memory of their own. Files are opened when first read and closed with the checkpoint.
    """

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self._stack = ExitStack()
        self._handles: dict[str, safe_open] = {}

    @property
    def config(self) -> ModelConfig:
        return self.inventory.config

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

    def part(self, name: str, axis: int | None = None, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Stored items `[start, stop)` of a tensor along `axis`; nothing outside them is copied.

        Raises:
            UnknownTensorError: no tensor of that name.
            SourceChangedError: the file is not the one that was checked.
            TensorReadError: its bytes cannot be read.
            ScaleNanError: a scale among them is E8M0 code 255.
        """
        stored = self.inventory.tensors.get(name)
        if stored is None:
            raise UnknownTensorError(str(self.inventory.directory), name, "a tensor of this checkpoint")
        source = self.inventory.files[stored.file]
        source.require_unchanged()
        where = tuple(slice(start, stop) if axis == d else slice(None) for d in range(len(stored.expected.shape)))
        try:
            view: torch.Tensor = self._handle(stored.file).get_slice(name)[where]
        except (SafetensorError, OSError, RuntimeError) as error:
            raise TensorReadError(f"{name} in {stored.file}", str(error), "readable bytes") from error
        # The view shows the mapped file, which may change or go away; nobody outside gets to hold it.
        tensor = view.clone(memory_format=torch.contiguous_format)
        source.require_unchanged()
        if tensor.dtype == torch.float8_e8m0fnu:
            _require_numbers(tensor, stored)
        return tensor

    def close(self) -> None:
        """Close the files."""
        self._handles.clear()
        self._stack.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _handle(self, file: str) -> safe_open:
        if file not in self._handles:
            opened = safe_open(self.inventory.files[file].path, framework="pt", device="cpu")
            self._handles[file] = self._stack.enter_context(opened)
        return self._handles[file]


def _require_numbers(scale: torch.Tensor, stored: StoredTensor) -> None:
    """Refuse NaN scales: one poisons a whole tile, and a reader that ignores NaN makes it 2^128."""
    nan = scale.view(torch.uint8) == _E8M0_NAN
    if bool(nan.any()):
        at = nan.nonzero()[0].tolist()
        raise ScaleNanError(f"{stored.expected.name}{at} in {stored.file}", _E8M0_NAN, "an E8M0 code from 0 to 254")
