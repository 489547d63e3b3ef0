"""Checkpoints and vectors that tests of several distributions share."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from v41_config import TINY
from v41_goldens import ModelWeights
from v41_loader import open_checkpoint
from v41_loader.cli import SYNTH_SEEDS
from v41_loader.synth import synthesize_checkpoint


@pytest.fixture(scope="session")
def vectors() -> Path:
    """Directory of the conformance files."""
    return Path(__file__).parent / "conformance"


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The TINY checkpoint in the released format."""
    directory = tmp_path_factory.mktemp("checkpoints") / "tiny"
    synthesize_checkpoint(TINY, SYNTH_SEEDS["tiny"], directory)
    return directory


@pytest.fixture(scope="session")
def tiny_tensors(tiny_checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor of text inference, whole."""
    with open_checkpoint(tiny_checkpoint) as checkpoint:
        return checkpoint.read(checkpoint.names)


@pytest.fixture(scope="session")
def tiny_weights(tiny_tensors: dict[str, Tensor]) -> ModelWeights:
    return ModelWeights.from_tensors(TINY, tiny_tensors)
