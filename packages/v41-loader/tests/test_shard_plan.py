"""Plans against the shards that are then written, and at the size of the release against published totals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from v41_config import FLASH, TINY, ParallelLayout
from v41_config.errors import LayoutError
from v41_loader import expected_tensors, open_checkpoint, plan_shards, rank_tensors, read_inventory, shard_checkpoint
from v41_loader.cli import main
from v41_loader.errors import LayoutGeometryError, ShardingError, UnknownLayoutError
from v41_loader.inventory import Inventory
from v41_loader.rules import TensorGroup
from v41_loader.sharding.plan_command import _rank_table
from v41_loader.sharding.shard_plan import RankPlan

TEXT_BYTES = 298_309_535_168 - 40 * 384 * 4
"""Of the release without Engram, drafting, vision and the router's bias of image tokens."""


@pytest.fixture(scope="module")
def flash(flash_headers: Path) -> Inventory:
    return read_inventory(flash_headers, without_engram=True)


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 1), (4, 2), (1, 4)])
def test_a_plan_is_what_then_happens(tiny_checkpoint: Path, tmp_path: Path, tp: int, dp: int) -> None:
    layout = ParallelLayout(tp, dp)
    inventory = read_inventory(tiny_checkpoint)
    plan = plan_shards(inventory, layout)
    report = shard_checkpoint(inventory, tmp_path / "out", layout)
    stored = sum(group.stored_nbytes for group in report.groups)
    assert plan.written_bytes == stored == sum(rank.nbytes for rank in plan.ranks)
    assert plan.tensors == len(inventory.tensors) - 10
    assert plan.read_bytes == sum(t.expected.nbytes for t in inventory.tensors.values() if not t.expected.skipped)
    with open_checkpoint(tiny_checkpoint) as checkpoint:
        for rank in plan.ranks:
            held = rank_tensors(checkpoint, layout, rank.rank)
            assert rank.tensors == len(held)
            assert rank.nbytes == rank.read_bytes == sum(tensor.nbytes for tensor in held.values())
            for group, nbytes in rank.groups.items():
                names = [name for name in held if inventory.tensors[name].expected.rule.group is group]
                assert nbytes == sum(held[name].nbytes for name in names)


def test_some_ranks(tiny_checkpoint: Path) -> None:
    """Experts of other ranks are not read, and files that hold nothing of these ranks not counted."""
    inventory, layout = read_inventory(tiny_checkpoint), ParallelLayout(2, 2)
    plan, whole = plan_shards(inventory, layout, [3, 1, 3]), plan_shards(inventory, layout)
    assert [rank.rank for rank in plan.ranks] == [1, 3]
    assert plan.ranks == (whole.ranks[1], whole.ranks[3])
    assert plan.written_bytes < whole.written_bytes
    assert plan.read_bytes < whole.read_bytes
    assert plan.files == whole.files == 6


def test_the_release(flash: Inventory) -> None:
    plan = plan_shards(flash, ParallelLayout(4, 2))
    assert (plan.tensors, plan.read_bytes, plan.files) == (96_085 - 40 - 12 - 2401 - 266, TEXT_BYTES, 42)
    assert (plan.checkpoint_tensors, plan.checkpoint_bytes, plan.checkpoint_files) == (96_085, 510_286_023_000, 48)
    assert sum(total.nbytes for total in plan.skipped) == 510_286_023_000 - TEXT_BYTES
    assert {rank.groups[TensorGroup.ROUTED_EXPERTS] for rank in plan.ranks} == {
        384 // 8 * 40 * 3 * 2304 * 5120 * 17 // 32
    }
    assert {rank.groups[TensorGroup.EMBEDDING] for rank in plan.ranks} == {129_280 // 4 * 5120 * 2}
    assert plan.notice == "not comparable with the released model"


def test_the_release_in_the_device_layout(flash: Inventory) -> None:
    """Each scale of a 32 x 32 tile is written 32 times; nothing else grows."""
    canonical, device = (
        plan_shards(flash, ParallelLayout(8, 1), weight_layout=name) for name in ("canonical", "device")
    )
    tiled = [t for t in expected_tensors(FLASH).values() if t.rule.item_extents == (32, 32) and not t.skipped]
    cut = sum(t.nbytes for t in tiled if t.rule.axis is not None)
    whole = sum(t.nbytes for t in tiled if t.rule.axis is None)
    assert device.written_bytes - canonical.written_bytes == 31 * (cut + 8 * whole)
    assert device.read_bytes == canonical.read_bytes
    assert device.memory_bound > canonical.memory_bound
    largest = max(tensor.nbytes for tensor in expected_tensors(FLASH).values() if not tensor.skipped)
    assert canonical.memory_bound <= (256 << 20) + largest


def test_what_cannot_be_planned(flash: Inventory, tiny_checkpoint: Path) -> None:
    with pytest.raises(LayoutError):
        plan_shards(flash, ParallelLayout(3, 1))
    for huge in (ParallelLayout(4096, 1), ParallelLayout(1, 4096)):  # whose ranks nobody counts
        with pytest.raises(LayoutError):
            plan_shards(flash, huge)
    with pytest.raises(LayoutError):
        plan_shards(flash, ParallelLayout(4, 2), ranks=[8])
    with pytest.raises(ShardingError, match="at least one rank"):
        plan_shards(flash, ParallelLayout(4, 2), ranks=[])
    with pytest.raises(UnknownLayoutError):
        plan_shards(flash, ParallelLayout(4, 2), weight_layout="row-major")
    with pytest.raises(LayoutGeometryError):
        plan_shards(read_inventory(tiny_checkpoint), ParallelLayout(1, 1), weight_layout="device")


def test_the_command_prints_json(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--checkpoint", str(tiny_checkpoint), "--tp", "4", "--dp", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    plan = plan_shards(read_inventory(tiny_checkpoint), ParallelLayout(4, 2))
    assert document == json.loads(json.dumps(plan.to_json()))
    assert (document["tp"], document["dp"], document["ep"], document["notice"]) == (4, 2, 8, None)
    assert [rank["bytes"] for rank in document["ranks"]] == [rank.nbytes for rank in plan.ranks]
    assert document["skipped"] == [
        {"class": "router bias of image tokens", "tensors": 10, "bytes": 640, "skipped": True}
    ]


def test_the_command_prints_a_table(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--checkpoint", str(tiny_checkpoint), "--tp", "2", "--dp", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "checkpoint: 1,289 tensors, 8,670,256 bytes in 6 files" in lines
    embedding = f"{TINY.vocab_size // 2 * TINY.hidden_size * 2:,}"
    assert f"{'bytes by class':<28}  each of ranks 0-1" in lines
    assert ["embedding", embedding] in [line.split() for line in lines]
    assert "skipped: router bias of image tokens, 10 tensors, 640 bytes" in lines


def test_ranks_that_take_the_same_share_a_column() -> None:
    """Each number stands under the ranks that it belongs to."""
    ranks = [RankPlan(rank, 7, 1000 + odd, 5, {TensorGroup.HEAD: odd}) for rank, odd in enumerate([0, 9, 0, 0])]
    head, *lines = _rank_table(ranks)
    assert head == f"{'bytes by class':<28}  each of ranks 0,2-3            rank 1"
    assert [line.split() for line in lines] == [
        ["head", "0", "9"], ["all", "1,000", "1,009"], ["tensors", "7", "7"],
        ["read", "by", "one", "rank", "alone", "5", "5"],
    ]  # fmt: skip
    assert {len(line) for line in lines} == {len(head)}


def test_the_command_refuses_an_engram_that_nobody_left_out(
    flash_headers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--checkpoint", str(flash_headers), "--tp", "4", "--dp", "2"]) == 2
    assert "Engram in layers [1, 14]" in capsys.readouterr().err


MEASURE = """
import json, sys, time
from v41_config import ParallelLayout
from v41_loader import plan_shards, read_inventory
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
before, start = resident(), time.process_time()
inventory = read_inventory(sys.argv[1], without_engram=True)
plan = plan_shards(inventory, ParallelLayout(4, 2))
seconds = time.process_time() - start
from v41_loader.layouts import get_layout
from v41_loader.sharding.rank_contents import rank_contents
contents = rank_contents(inventory.config, ParallelLayout(4, 2), range(8), get_layout("canonical"))
print(json.dumps(["torch" in sys.modules, seconds, resident() - before, plan.memory_bound]))
"""


def test_planning_the_release_is_quick_needs_no_torch_and_states_its_memory(flash_headers: Path) -> None:
    """Seconds are those of the processor, which others may share; the bound is twice what a quiet one takes."""
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(flash_headers)], capture_output=True, text=True, check=True
    )
    torch_imported, seconds, bookkeeping, bound = json.loads(run.stdout)
    assert not torch_imported
    assert seconds < 2
    assert 16 << 20 < bookkeeping < bound
