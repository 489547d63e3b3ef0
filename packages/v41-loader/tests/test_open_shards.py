"""Reading sharded directories: a rank's tensors as the checkpoint's, and nothing that is not as it was written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from v41_config import TINY, ParallelLayout
from v41_loader import (
    Inventory,
    ShardedCheckpoint,
    open_checkpoint,
    open_shards,
    rank_tensors,
    read_inventory,
    shard_checkpoint,
)
from v41_loader.errors import (
    DigestMismatchError,
    ManifestError,
    MissingRankError,
    ScaleNanError,
    SourceChangedError,
    UnknownTensorError,
    WeightLayoutError,
)
from v41_loader.inventory import NOT_COMPARABLE
from v41_loader.layouts import get_layout

TP4_DP2 = ParallelLayout(4, 2)


@pytest.fixture(scope="module")
def whole(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shards") / "out"
    shard_checkpoint(read_inventory(tiny_checkpoint), directory, TP4_DP2)
    return directory


@pytest.fixture
def shards(whole: Path, tmp_path: Path) -> Path:
    """Shards that a test may damage."""
    return Path(shutil.copytree(whole, tmp_path / "shards"))


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    same_form = one.dtype == other.dtype and one.shape == other.shape
    return same_form and torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8))


def test_a_rank_is_what_the_checkpoint_gives(whole: Path, tiny_checkpoint: Path) -> None:
    with open_shards(whole) as shards, open_checkpoint(tiny_checkpoint) as checkpoint:
        assert (shards.config, shards.layout, shards.ranks, shards.notice) == (TINY, TP4_DP2, tuple(range(8)), None)
        for rank in shards.ranks:
            expected = rank_tensors(checkpoint, TP4_DP2, rank)
            found = shards.rank_tensors(rank)
            assert set(found) == set(expected) == set(shards.names(rank))
            assert all(same_bytes(found[name], expected[name]) for name in expected)


def test_tensors_come_one_after_the_other_in_file_order(whole: Path) -> None:
    shards = open_shards(whole)
    entries = shards.inventory.contents.entries[6]
    places = [entries[name].begin for name, _ in shards.iterate(6)]
    assert places == sorted(places)
    assert len(places) == len(entries)


def test_tensors_own_their_memory(shards: Path) -> None:
    opened = open_shards(shards)
    first, second = opened.tensor(0, "norm.weight"), opened.tensor(0, "norm.weight")
    first.zero_()
    assert second.float().abs().sum() > 0
    opened.close()
    shutil.rmtree(shards)
    assert second.float().abs().sum() > 0


def test_some_ranks_are_enough_for_their_reader(tiny_checkpoint: Path, tmp_path: Path) -> None:
    shard_checkpoint(read_inventory(tiny_checkpoint), tmp_path, TP4_DP2, ranks=[2, 5])
    shards = open_shards(tmp_path)
    assert shards.ranks == (2, 5)
    assert shards.tensor(5, "layers.0.ffn.experts.10.w1.weight").dtype == torch.int8
    for rank in (0, 8, -1):
        with pytest.raises(MissingRankError, match=f"rank {rank}"):
            shards.rank_tensors(rank)


def test_a_tensor_of_another_rank_is_an_error(whole: Path) -> None:
    with pytest.raises(UnknownTensorError, match=r"rank-00\.safetensors.*experts\.10"):
        open_shards(whole).tensor(0, "layers.0.ffn.experts.10.w1.weight")


def test_changed_bytes_are_refused(shards: Path) -> None:
    opened = open_shards(shards)
    entry = opened.inventory.contents.entries[1]["layers.0.attn.wq_b.weight"]
    path = shards / "rank-01.safetensors"
    data = bytearray(path.read_bytes())
    data[entry.end - 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(SourceChangedError, match="rank-01"):  # what was opened is not what is read
        opened.tensor(1, "norm.weight")
    opened = open_shards(shards)
    assert opened.tensor(1, "norm.weight").shape == (256,)
    with pytest.raises(DigestMismatchError, match=r"layers\.0\.attn\.wq_b\.weight in rank-01\.safetensors"):
        opened.tensor(1, "layers.0.attn.wq_b.weight")


def test_a_nan_scale_is_refused_even_with_its_digest(shards: Path) -> None:
    import xxhash

    name = "layers.2.ffn.experts.4.w2.scale"
    entry = open_shards(shards).inventory.contents.entries[2][name]
    data = bytearray((shards / "rank-02.safetensors").read_bytes())
    data[entry.begin + entry.shape[1] + 1] = 255
    (shards / "rank-02.safetensors").write_bytes(data)
    manifest = json.loads((shards / "manifest.json").read_text())
    manifest["tensors"][name]["source"] = [xxhash.xxh3_128_hexdigest(data[entry.begin : entry.end])]
    (shards / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ScaleNanError) as caught:
        open_shards(shards).tensor(2, name)
    assert caught.value.where == f"{name}[1, 1] in rank-02.safetensors"


def test_a_checkpoint_is_no_sharded_directory(tiny_checkpoint: Path) -> None:
    with pytest.raises(ManifestError, match=r"no manifest\.json"):
        open_shards(tiny_checkpoint)


def test_the_device_layout_is_for_who_asks_for_it(small_source: Inventory, small_shards: dict[str, Path]) -> None:
    """Torch code reads the canonical layout; the other one has the same names and, some of them, the same shapes."""
    with pytest.raises(WeightLayoutError) as caught:
        open_shards(small_shards["device"])
    assert (caught.value.found, caught.value.expected) == ("device", "shards in the canonical layout")
    shards: ShardedCheckpoint = open_shards(small_shards["device"], weight_layout="device")
    assert open_shards(small_shards["canonical"]).config == shards.config
    changed = 0
    with open_checkpoint(small_source.directory) as checkpoint:
        for rank in shards.ranks:
            for name, tensor in rank_tensors(checkpoint, shards.layout, rank).items():
                expected = checkpoint.inventory.tensors[name].expected
                transform = get_layout("device").transform(expected, tuple(tensor.shape))
                found = shards.tensor(rank, name)
                if transform is None:
                    assert same_bytes(found, tensor)
                    continue
                rows = tensor.view(torch.uint8).numpy().reshape(len(tensor), -1)
                image = np.concatenate([
                    transform.apply(rows[row : row + transform.rows_per_block]).reshape(-1)
                    for row in range(0, len(rows), transform.rows_per_block)
                ])  # fmt: skip
                assert tuple(found.shape) == tuple(transform.output_shape)
                assert np.array_equal(found.view(torch.uint8).numpy().reshape(-1), image), name
                changed += 1
    assert changed > 100


def test_what_engram_leaves_out_is_said(tiny_checkpoint: Path, shards: Path) -> None:
    """A notice in the manifest reaches whoever opens the shards."""
    manifest = json.loads((shards / "manifest.json").read_text())
    manifest["settings"]["notice"] = NOT_COMPARABLE
    (shards / "manifest.json").write_text(json.dumps(manifest))
    assert open_shards(shards).notice == NOT_COMPARABLE


def test_checking_shards_does_not_import_torch(whole: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    code = f"""
import sys
from v41_config import ParallelLayout
from v41_loader import read_inventory, shard_checkpoint, verify_shards
verify_shards({str(whole)!r})
shard_checkpoint(read_inventory({str(tiny_checkpoint)!r}), {str(tmp_path / "out")!r}, ParallelLayout(2, 1), [0])
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=os.environ | {"OMP_NUM_THREADS": "1"})
