"""The TINY checkpoint in the released format, made once for all tests of this directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from v41_config import TINY
from v41_goldens.weights import ModelWeights
from v41_loader import Checkpoint, open_checkpoint, synthesize_checkpoint


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """TINY's operators are too small to share: threads that wait for each other cost more than they do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints") / "tiny"
    synthesize_checkpoint(TINY, 4105, directory)
    return directory


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_directory: Path) -> Iterator[Checkpoint]:
    with open_checkpoint(tiny_directory) as checkpoint:
        yield checkpoint


@pytest.fixture(scope="session")
def tiny_weights(tiny_checkpoint: Checkpoint) -> ModelWeights:
    """Every weight in one process, for the golden."""
    return ModelWeights.from_tensors(TINY, tiny_checkpoint.read(tiny_checkpoint.names))
