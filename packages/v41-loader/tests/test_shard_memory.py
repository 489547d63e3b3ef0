"""The memory that sharding and verifying take is bounded, however large the checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from v41_config import FLASH, FLASH6, ModelConfig, ParallelLayout
from v41_loader import expected_tensors, plan_shards, read_inventory, synthesize_headers

MIB = 1 << 20
Peaks = Callable[..., list[int]]

MEASURE = """
import sys
import numpy, v41_loader.cli
from v41_config import ParallelLayout
from v41_loader import read_inventory, shard_checkpoint, verify_shards

source, out, weight_layout, ranks, action = sys.argv[1:]
after_imports = peak()
inventory = read_inventory(source)
ranks = eval(ranks)
if action == "hold":
    held = [file.path.read_bytes() for file in inventory.files.values()]
shard_checkpoint(inventory, out, ParallelLayout(4, 2), ranks=ranks, weight_layout=weight_layout, threads=4)
sharded = peak()
verify_shards(out, inventory, ranks, threads=4)
print(sharded - after_imports, peak() - after_imports)
"""


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A place for large files, which pytest would keep."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.fixture
def peaks(run_measured: Callable[..., list[int]]) -> Peaks:
    """Bytes above those after imports, once sharded and once verified too."""

    def run(source: Path, out: Path, layout: str, ranks: list[int] | None, action: str = "stream") -> list[int]:
        return run_measured(MEASURE, str(source), str(out), layout, str(ranks), action)

    return run


def sizes(config: ModelConfig) -> tuple[int, int]:
    """Bytes of all tensors and of the largest."""
    nbytes = [tensor.nbytes for tensor in expected_tensors(config).values()]
    return sum(nbytes), max(nbytes)


@pytest.mark.parametrize("weight_layout", ["canonical", "device"])
def test_memory_is_far_below_the_checkpoint(
    write_headers: Callable[..., Path],
    tensors_of: Callable[..., dict[str, object]],
    peaks: Peaks,
    scratch: Path,
    weight_layout: str,
) -> None:
    config = FLASH.scaled(hidden_size=1024, num_hidden_layers=6, vocab_size=1024, moe_intermediate_size=1024,
                          n_routed_experts=16, num_experts_per_tok=2, num_attention_heads=16, o_groups=8)  # fmt: skip
    total, largest = sizes(config)
    bound = 48 * MIB + largest
    assert total > 3 * bound
    source = write_headers(config, tensors_of(config).values())
    assert max(peaks(source, scratch / "out", weight_layout, None)) < bound
    if weight_layout == "canonical":
        assert min(peaks(source, scratch / "held", weight_layout, [0], "hold")) > total > bound


@pytest.mark.slow
@pytest.mark.parametrize("weight_layout", ["canonical", "device"])
def test_memory_with_the_released_dimensions(
    write_headers: Callable[..., Path],
    tensors_of: Callable[..., dict[str, object]],
    peaks: Peaks,
    scratch: Path,
    weight_layout: str,
) -> None:
    """Four TP ranks of six layers."""
    source = write_headers(FLASH6, tensors_of(FLASH6).values())
    total, largest = sizes(FLASH6)
    bound = 256 * MIB + largest
    assert total > 6 * bound
    assert max(peaks(source, scratch / "out", weight_layout, [0, 1, 2, 3])) < bound


NARROW = {
    "hidden_size": 256, "moe_intermediate_size": 256, "num_attention_heads": 8, "head_dim": 128, "qk_rope_head_dim": 32,
    "q_lora_rank": 256, "o_groups": 4, "o_lora_rank": 64, "vocab_size": 512, "index_n_heads": 4, "index_head_dim": 64,
    "image_token_id": None, "engram": None, "drafting": None, "vision": None,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("weight_layout", ["canonical", "device"])
def test_memory_with_the_released_number_of_tensors(peaks: Peaks, scratch: Path, weight_layout: str) -> None:
    """93,406 tensors of 1.7 GB for eight ranks: what is kept of each, and the plan's bound for it, which is below the
    limit whatever the largest tensor."""
    config = ModelConfig.model_validate({f: getattr(FLASH, f) for f in ModelConfig.model_fields} | NARROW)
    synthesize_headers(config, scratch / "source")
    inventory = read_inventory(scratch / "source")
    assert len(inventory.tensors) == 93_406
    plan = plan_shards(inventory, ParallelLayout(4, 2), weight_layout=weight_layout, threads=4)
    found = max(peaks(scratch / "source", scratch / "out", weight_layout, None))
    assert 64 * MIB < found < plan.memory_bound
    assert found < 256 * MIB
