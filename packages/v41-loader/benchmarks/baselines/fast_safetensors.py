"""The tensors of a checkpoint as fastsafetensors gives them, where that is installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def is_installed() -> bool:
    """Whether there is anything to compare with: the package is no dependency."""
    return importlib.util.find_spec("fastsafetensors") is not None


@contextmanager
def loaded_files(paths: Iterable[Path]) -> Iterator[Any]:
    """All files, whole, in memory of the library: `get_tensor(name)` gives views of it."""
    library = importlib.import_module("fastsafetensors")
    loader = library.SafeTensorsFileLoader(library.SingleGroup(), device="cpu", nogds=True, set_numa=False)
    try:
        loader.add_filenames({0: [str(path) for path in paths]})
        files = loader.copy_files_to_device()
        try:
            yield files
        finally:
            files.close()
    finally:
        loader.close()
