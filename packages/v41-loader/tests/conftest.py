"""Checkpoints for the loader's tests: a real synthetic one, copies to damage, and header-only ones of any content."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import pytest

from v41_config import FLASH, TINY, ModelConfig
from v41_loader import expected_tensors, synthesize_checkpoint
from v41_loader.header import encode_header
from v41_loader.index import INDEX_FILE, SINGLE_FILE
from v41_loader.synth import synthesize_headers

TINY_SEED = 4105
HeaderTensor = tuple[str, str, tuple[int, ...]]
"""Name, safetensors dtype and shape."""


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The synthetic checkpoint of TINY; read only."""
    directory = tmp_path_factory.mktemp("tiny") / "checkpoint"
    synthesize_checkpoint(TINY, TINY_SEED, directory)
    return directory


@pytest.fixture(scope="session")
def flash_headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The headers of the release, without payload; read only."""
    directory = tmp_path_factory.mktemp("flash") / "checkpoint"
    synthesize_headers(FLASH, directory)
    return directory


@pytest.fixture
def damaged(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of TINY's checkpoint that a test may damage."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "damaged"))


@pytest.fixture(scope="session")
def reference_recipe() -> ModuleType:
    """The plain transcription of the synthetic recipe that stands beside the benchmarks."""
    path = Path(__file__).parents[1] / "benchmarks" / "baselines" / "reference_recipe.py"
    spec = importlib.util.spec_from_file_location("reference_recipe", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def header_tensors(config: ModelConfig) -> dict[str, HeaderTensor]:
    return {name: (name, tensor.dtype, tensor.shape) for name, tensor in expected_tensors(config).items()}


@pytest.fixture
def tensors_of() -> Callable[[ModelConfig], dict[str, HeaderTensor]]:
    """Every tensor of a config as a header states it."""
    return header_tensors


@pytest.fixture
def write_headers(tmp_path: Path) -> Callable[..., Path]:
    """Writes a checkpoint whose headers are real and whose payload is a hole (zeros that take no disk)."""

    def write(config: ModelConfig, *shards: Iterable[HeaderTensor], weight_map: dict[str, str] | None = None) -> Path:
        directory = tmp_path / "headers"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config.to_released_json()))
        found: dict[str, str] = {}
        for number, tensors in enumerate(shards):
            name = SINGLE_FILE if len(shards) == 1 and weight_map is None else f"shard-{number}.safetensors"
            header, entries = encode_header(tensors)
            with (directory / name).open("wb") as file:
                file.write(header)
                file.truncate(max((entry.end for entry in entries.values()), default=len(header)))
            found |= dict.fromkeys(entries, name)
        if len(shards) > 1 or weight_map is not None:
            index = {"metadata": {}, "weight_map": found if weight_map is None else weight_map}
            (directory / INDEX_FILE).write_text(json.dumps(index))
        return directory

    return write
