"""Checkpoints and shards for the loader's tests: synthetic ones, copies to damage, header-only ones of any content."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from v41_config import FLASH, TINY, ModelConfig, ParallelLayout
from v41_loader import Inventory, expected_tensors, read_inventory, shard_checkpoint, synthesize_checkpoint
from v41_loader.header import encode_header
from v41_loader.index import INDEX_FILE, SINGLE_FILE
from v41_loader.synth import synthesize_headers

TINY_SEED = 4105
SMALL_LAYOUT = ParallelLayout(2, 2)
HeaderTensor = tuple[str, str, tuple[int, ...]]
"""Name, safetensors dtype and shape."""

# The high-water mark of this process image; `ru_maxrss` would begin with that of the process that started it.
PEAK = """
from pathlib import Path

def peak():
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10
"""


@pytest.fixture(scope="session")
def run_measured() -> Callable[..., list[int]]:
    """Runs a program that has `peak()`, the most bytes that it had so far, with arguments; gives the numbers that it
    prints."""

    def run(program: str, *arguments: str) -> list[int]:
        command = [sys.executable, "-c", PEAK + program, *arguments]
        found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
        return [int(value) for value in found.stdout.split()]

    return run


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


@pytest.fixture(scope="session")
def small_source(tmp_path_factory: pytest.TempPathFactory) -> Inventory:
    """A checkpoint of the smallest widths that the device layout takes, for TP2 and DP2; read only."""
    config = FLASH.scaled(hidden_size=256, num_hidden_layers=6, vocab_size=64, layout=SMALL_LAYOUT,
                          moe_intermediate_size=256, n_routed_experts=4, num_experts_per_tok=2)  # fmt: skip
    directory = tmp_path_factory.mktemp("small") / "checkpoint"
    synthesize_checkpoint(config, 1, directory, shards=3)
    return read_inventory(directory)


@pytest.fixture(scope="session")
def small_shards(small_source: Inventory, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Its shards for TP2 and DP2 by layout; read only."""
    directory = tmp_path_factory.mktemp("shards")
    for weight_layout in ("canonical", "device"):
        shard_checkpoint(small_source, directory / weight_layout, SMALL_LAYOUT, weight_layout=weight_layout)
    return {path.name: path for path in directory.iterdir()}


@pytest.fixture
def canonical_shards(small_shards: dict[str, Path], tmp_path: Path) -> Path:
    """Canonical shards that a test may damage."""
    return Path(shutil.copytree(small_shards["canonical"], tmp_path / "shards"))


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


@pytest.fixture
def edit_header() -> Callable[..., None]:
    """Rewrites the header of a safetensors file: `edit(header, payload)` changes either in place."""

    def rewrite(path: Path, edit: Callable[[dict[str, Any], bytearray], object]) -> None:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header, payload = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
        edit(header, payload)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        path.write_bytes(len(text).to_bytes(8, "little") + text + payload)

    return rewrite


@pytest.fixture
def edit_manifest() -> Callable[..., None]:
    """Rewrites the manifest of a sharded directory: `edit(document)` changes it in place."""

    def rewrite(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
        path = directory / "manifest.json"
        document = json.loads(path.read_text())
        edit(document)
        path.write_text(json.dumps(document))

    return rewrite
