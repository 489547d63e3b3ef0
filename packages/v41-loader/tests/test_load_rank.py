"""Loading a rank for serving: the same bytes from a checkpoint and from shards, in memory of their own, in a budget."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from v41_config import FLASH, LayoutError, ParallelLayout
from v41_loader import (
    Checkpoint,
    Inventory,
    ShardedCheckpoint,
    expected_tensors,
    load_rank,
    open_checkpoint,
    open_shards,
    open_weights,
    rank_part,
    rank_tensors,
    read_inventory,
    shard_checkpoint,
    shard_tensor,
)
from v41_loader.errors import (
    AmbiguousCheckpointError,
    DigestMismatchError,
    EngramCheckpointError,
    MissingRankError,
    NonFiniteWeightError,
    ShardingError,
    WeightLayoutError,
)
from v41_loader.rank_loading import RankRead

TP2_DP2 = ParallelLayout(2, 2)
MIB = 1 << 20


@pytest.fixture(scope="module")
def checkpoint(small_source: Inventory) -> Checkpoint:
    return open_checkpoint(small_source.directory)


@pytest.fixture(scope="module", params=["checkpoint", "shards"])
def source(
    request: pytest.FixtureRequest, checkpoint: Checkpoint, small_shards: dict[str, Path]
) -> Checkpoint | ShardedCheckpoint:
    return checkpoint if request.param == "checkpoint" else open_shards(small_shards["canonical"])


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("budget", [0, 100_000, 1 << 30])
def test_every_tensor_of_a_rank_comes_once(
    source: Checkpoint | ShardedCheckpoint, checkpoint: Checkpoint, rank: int, budget: int
) -> None:
    """Against whole tensors that are cut in memory, whatever the budget; all are kept, so that a buffer that were used
    again would show."""
    config = checkpoint.config
    found = list(load_rank(source, TP2_DP2, rank, host_budget=budget))
    assert len(dict(found)) == len(found)
    held = [n for n, t in expected_tensors(config).items() if rank_part(t, config, TP2_DP2, rank) is not None]
    assert sorted(dict(found)) == sorted(held)
    for name, tensor in found:
        expected = shard_tensor(name, checkpoint.tensor(name), config, TP2_DP2, rank)
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
        assert raw(tensor) == raw(expected), name


def test_all_at_once_is_the_same_in_file_order(source: Checkpoint | ShardedCheckpoint) -> None:
    one_by_one = dict(load_rank(source, TP2_DP2, 1, threads=1))
    at_once = rank_tensors(source, TP2_DP2, 1)
    assert list(at_once) == list(one_by_one) == [item.name for item in source.rank_reads(TP2_DP2, 1)]
    assert {name: raw(tensor) for name, tensor in at_once.items()} == {n: raw(t) for n, t in one_by_one.items()}


def test_each_tensor_owns_its_memory_and_no_more(source: Checkpoint | ShardedCheckpoint) -> None:
    tensors = dict(load_rank(source, TP2_DP2, 0))
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors.values())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    for tensor in tensors.values():
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    before = raw(tensors["norm.weight"])
    tensors["norm.weight"].zero_()
    assert raw(dict(load_rank(source, TP2_DP2, 0))["norm.weight"]) == before


def test_a_device_gets_the_stored_dtypes(source: Checkpoint | ShardedCheckpoint) -> None:
    on_cpu = rank_tensors(source, TP2_DP2, 3)
    for name, tensor in load_rank(source, TP2_DP2, 3, device="meta"):
        assert (tensor.device.type, tensor.dtype, tensor.shape) == ("meta", on_cpu[name].dtype, on_cpu[name].shape)


class Recorded:
    """Reads that count the bytes under way: begun, and not yet taken by the caller."""

    def __init__(self, costs: list[int]) -> None:
        self.costs, self.outstanding, self.most, self.reads = costs, 0, 0, 0
        self._lock = threading.Lock()

    def rank_reads(self, layout: ParallelLayout, rank: int) -> Sequence[RankRead]:
        return [RankRead(str(number), cost, partial(self._read, cost)) for number, cost in enumerate(self.costs)]

    def _read(self, cost: int) -> torch.Tensor:
        with self._lock:
            self.reads += 1
            self.outstanding += cost
            self.most = max(self.most, self.outstanding)
        return torch.zeros(cost, dtype=torch.uint8)

    def taken(self, tensor: torch.Tensor) -> None:
        with self._lock:
            self.outstanding -= tensor.nbytes


@pytest.mark.parametrize(("budget", "most"), [(0, 900), (250, 900), (1000, 1000), (5000, 5000)])
def test_no_more_than_the_budget_is_under_way(budget: int, most: int) -> None:
    """A slow caller holds the readers up; the one tensor that is larger than the budget is read alone."""
    source = Recorded([100, 250, 900, 30] * 20)
    for _, tensor in load_rank(source, TP2_DP2, 0, host_budget=budget, threads=4):
        time.sleep(0.001)
        source.taken(tensor)
    assert source.reads == 80
    assert 900 <= source.most <= most


def test_whoever_leaves_off_stops_the_reading() -> None:
    source = Recorded([10] * 1000)
    loading = load_rank(source, TP2_DP2, 0, threads=2)
    next(loading)
    loading.close()
    read = source.reads
    assert read < 100
    time.sleep(0.05)
    assert source.reads == read


def test_bad_arguments_are_refused_before_anything_is_read(
    checkpoint: Checkpoint, small_shards: dict[str, Path], tmp_path: Path
) -> None:
    shards = open_shards(small_shards["canonical"])
    for source in (checkpoint, shards):
        for budget in (-1, 1.5, "1"):
            with pytest.raises(ShardingError, match="host_budget"):
                load_rank(source, TP2_DP2, 0, host_budget=budget)  # type: ignore[arg-type]
        for device in ("nope", "", "cuda:99"):
            with pytest.raises(ShardingError, match="device: expected a device that torch can use here"):
                load_rank(source, TP2_DP2, 0, device)
        with pytest.raises(ShardingError, match="threads"):
            load_rank(source, TP2_DP2, 0, threads=0)
    with pytest.raises(LayoutError, match="rank"):
        load_rank(checkpoint, TP2_DP2, 4)
    with pytest.raises(LayoutError, match="num_attention_heads"):
        load_rank(checkpoint, ParallelLayout(3, 1), 0)
    with pytest.raises(ShardingError, match=r"expected ParallelLayout\(tp=1, dp=2\), as asked for"):
        load_rank(shards, ParallelLayout(1, 2), 0)
    shard_checkpoint(checkpoint.inventory, tmp_path / "some", TP2_DP2, ranks=[1])
    with pytest.raises(MissingRankError, match="rank 0"):
        load_rank(open_shards(tmp_path / "some"), TP2_DP2, 0)


def test_what_is_wrong_with_a_tensor_is_told_while_loading(
    small_source: Inventory, canonical_shards: Path, tmp_path: Path
) -> None:
    """A NaN of a checkpoint, a flipped bit of a rank file: from a thread, as the error it is."""
    directory = Path(shutil.copytree(small_source.directory, tmp_path / "source"))
    stored = read_inventory(directory).tensors["norm.weight"]
    path = directory / stored.file
    data = bytearray(path.read_bytes())
    data[stored.entry.begin : stored.entry.begin + 2] = b"\xc0\x7f"
    path.write_bytes(data)
    with pytest.raises(NonFiniteWeightError, match=r"norm\.weight\[0\]"):
        dict(load_rank(open_checkpoint(directory), TP2_DP2, 0))
    entry = open_shards(canonical_shards).inventory.contents.entries[2]["norm.weight"]
    path = canonical_shards / "rank-02.safetensors"
    data = bytearray(path.read_bytes())
    data[entry.begin] ^= 1
    path.write_bytes(data)
    with pytest.raises(DigestMismatchError, match=r"norm\.weight in rank-02"):
        dict(load_rank(open_shards(canonical_shards), TP2_DP2, 2))


def test_weights_are_opened_whichever_way_they_are_stored(
    small_source: Inventory, small_shards: dict[str, Path], canonical_shards: Path
) -> None:
    assert isinstance(open_weights(small_source.directory), Checkpoint)
    shards = open_weights(canonical_shards)
    assert isinstance(shards, ShardedCheckpoint)
    assert (shards.config, shards.notice) == (small_source.config, None)
    with pytest.raises(WeightLayoutError):
        open_weights(small_shards["device"])
    (canonical_shards / "model.safetensors").touch()
    with pytest.raises(AmbiguousCheckpointError, match=r"manifest\.json"):
        open_weights(canonical_shards)


def test_shards_of_an_engram_checkpoint_need_the_same_consent(
    canonical_shards: Path, edit_manifest: Callable[..., None]
) -> None:
    notice = "not comparable with the released model"
    edit_manifest(canonical_shards, lambda document: document["settings"].update(notice=notice))
    with pytest.raises(EngramCheckpointError, match="without_engram"):
        open_weights(canonical_shards)
    assert open_weights(canonical_shards, without_engram=True).notice == notice


MEASURE = """
import sys
import torch, v41_loader.cli
from v41_config import ParallelLayout
from v41_loader import load_rank, open_weights
torch.zeros(8, dtype=torch.uint8).view(torch.float8_e8m0fnu)

source, budget, keep = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "keep"
weights = open_weights(source)
before, kept, total, largest = peak(), [], 0, 0
for name, tensor in load_rank(weights, ParallelLayout(1, 1), 0, host_budget=budget, threads=4):
    total, largest = total + tensor.nbytes, max(largest, tensor.nbytes)
    if keep:
        kept.append(tensor)
print(peak() - before, total, largest)
"""


@pytest.mark.parametrize("stored", ["checkpoint", "shards"])
def test_memory_is_the_budget_and_a_tensor(
    write_headers: Callable[..., Path],
    tensors_of: Callable[..., dict[str, object]],
    run_measured: Callable[..., list[int]],
    tmp_path: Path,
    stored: str,
) -> None:
    """Measured: a caller that hands tensors on needs the budget, one that keeps them all of them."""
    config = FLASH.scaled(hidden_size=1024, num_hidden_layers=6, vocab_size=1024, moe_intermediate_size=1024,
                          n_routed_experts=8, num_experts_per_tok=2, num_attention_heads=16, o_groups=8)  # fmt: skip
    source = write_headers(config, tensors_of(config).values())
    if stored == "shards":
        shard_checkpoint(read_inventory(source), tmp_path / "shards", ParallelLayout(1, 1))
        source = tmp_path / "shards"

    def measured(keep: str) -> list[int]:
        return run_measured(MEASURE, str(source), str(8 * MIB), keep)

    peak, total, largest = measured("hand on")
    bound = 8 * MIB + 2 * largest + 24 * MIB
    assert total > 2 * bound
    assert peak < bound
    if stored == "checkpoint":
        assert measured("keep")[0] > 0.9 * total
    shutil.rmtree(tmp_path)
