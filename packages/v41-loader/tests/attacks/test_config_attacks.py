"""A `config.json` that asks for more than any checkpoint holds, or that is no document at all."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from v41_config import FLASH
from v41_config.errors import ConfigError
from v41_loader import read_inventory, synthesize_headers
from v41_loader.errors import TensorCountError
from v41_loader.inventory import CONFIG_FILE

HUGE = 2**31 - 1


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    """The release's headers are not needed: the config is refused before any file of weights is opened, or by its
    tensors' number."""
    directory = tmp_path / "headers"
    synthesize_headers(FLASH.scaled(), directory)
    (directory / CONFIG_FILE).write_text(json.dumps(FLASH.to_released_json()))
    return directory


def change(directory: Path, field: str, value: int) -> None:
    """Set a field wherever in the document it stands."""

    def changed(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: value if key == field else changed(inner) for key, inner in node.items()}
        return node

    document = json.loads((directory / CONFIG_FILE).read_text())
    assert f'"{field}"' in json.dumps(document)
    (directory / CONFIG_FILE).write_text(json.dumps(changed(document)))


@pytest.mark.parametrize(("experts", "error", "bound"), [
    (20_000, TensorCountError, "at most 524288"), (65_536, TensorCountError, "at most 524288"),
    (HUGE, ConfigError, "n_routed_experts: expected less than or equal to 65536"),
])  # fmt: skip
def test_a_config_of_billions_of_experts(headers: Path, experts: int, error: type[Exception], bound: str) -> None:
    """Every one of them is 240 tensors whose names would be made before one is missed."""
    change(headers, "n_routed_experts", experts)
    start = time.process_time()
    tracemalloc.start()
    with pytest.raises(error, match=bound):
        read_inventory(headers, without_engram=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20
    assert time.process_time() - start < 10


def test_a_vision_tower_of_billions_of_layers(headers: Path) -> None:
    """A group that is skipped, but whose names are still expected."""
    document = json.loads((headers / CONFIG_FILE).read_text())
    document["vision_config"]["num_hidden_layers"] = HUGE
    (headers / CONFIG_FILE).write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"vision\.num_hidden_layers"):
        read_inventory(headers, without_engram=True)


def test_layers_that_the_config_does_not_describe(headers: Path) -> None:
    """The backbone's layers are listed one by one, so that their number is bounded by the document."""
    change(headers, "compress_ratios", HUGE)
    with pytest.raises(ConfigError):
        read_inventory(headers, without_engram=True)


def test_a_key_twice_in_the_config(headers: Path) -> None:
    """Two readers could each believe another width."""
    path = headers / CONFIG_FILE
    path.write_text(path.read_text().replace('"hidden_size":', '"hidden_size": 256, "hidden_size":', 1))
    with pytest.raises(ConfigError, match=r"^hidden_size: expected one value for a key"):
        read_inventory(headers, without_engram=True)


@pytest.mark.parametrize("field", ["hc_sinkhorn_iters", "sliding_window", "index_topk", "candidate_topk_blocks"])
def test_a_config_that_would_never_finish(headers: Path, field: str) -> None:
    """Work that the weights do not bound is bounded by the config's own rules."""
    change(headers, field, HUGE)
    with pytest.raises(ConfigError, match=rf"^{field}: expected less than or equal to"):
        read_inventory(headers, without_engram=True)


def test_a_huge_config_is_not_read(headers: Path) -> None:
    """Terabytes of white space: a hole in a sparse file."""
    with (headers / CONFIG_FILE).open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=CONFIG_FILE):
        read_inventory(headers, without_engram=True)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 200_000, '{"model_type": 3}'], ids=lambda text: text[:8])
def test_a_config_that_is_none(headers: Path, text: str) -> None:
    """Not JSON, too deep, or of no model."""
    (headers / CONFIG_FILE).write_text(text)
    with pytest.raises(ConfigError):
        read_inventory(headers, without_engram=True)
