"""The release as sparse files: its published counts and bytes, on next to no disk."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from v41_config import FLASH, TINY
from v41_loader import expected_tensors, open_checkpoint, read_inventory
from v41_loader.cli import main
from v41_loader.errors import SparseFilesError, SynthesisError
from v41_loader.index import INDEX_FILE
from v41_loader.rules import TensorGroup
from v41_loader.synth import headers_only, synthesize_headers

PUBLISHED_TENSORS, PUBLISHED_BYTES, PUBLISHED_SHARDS = 96_085, 510_286_023_000, 48


def disk_bytes(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.iterdir())


def test_the_release_has_its_published_size(flash_headers: Path) -> None:
    index = json.loads((flash_headers / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == PUBLISHED_BYTES
    assert len(index["weight_map"]) == PUBLISHED_TENSORS
    shards = sorted(flash_headers.glob("*.safetensors"))
    assert [path.name for path in shards] == [f"model-{i:05d}-of-00048.safetensors" for i in range(1, 49)]
    headers = sum(8 + int.from_bytes(path.open("rb").read(8), "little") for path in shards)
    assert sum(path.stat().st_size for path in shards) == PUBLISHED_BYTES + headers


def test_it_takes_the_disk_of_its_headers(flash_headers: Path) -> None:
    assert disk_bytes(flash_headers) < 24 << 20


def test_every_tensor_is_covered_skipped_groups_too(flash_headers: Path) -> None:
    inventory = read_inventory(flash_headers, without_engram=True)
    assert inventory.config == FLASH
    assert (len(inventory.tensors), len(inventory.files)) == (PUBLISHED_TENSORS, PUBLISHED_SHARDS)
    skipped = {total.group: total.nbytes for total in inventory.group_totals() if total.skipped}
    assert skipped[TensorGroup.ENGRAM] == 203_073_076_240
    assert set(skipped) == {
        TensorGroup.ROUTER_VISION_BIAS, TensorGroup.ENGRAM, TensorGroup.DRAFTING, TensorGroup.VISION
    }  # fmt: skip


@pytest.mark.parametrize(("name", "shard"), [
    ("vision.norm.weight", 1), ("embed.weight", 2), ("layers.0.attn_norm.weight", 3), ("layers.39.ffn.gate.bias", 42),
    ("mtp.0.main_norm.weight", 43), ("layers.1.engram.embed.weight", 47), ("layers.14.engram.wkv.scale", 48),
])  # fmt: skip
def test_tensors_stand_in_the_shards_of_the_release(flash_headers: Path, name: str, shard: int) -> None:
    weight_map = json.loads((flash_headers / INDEX_FILE).read_text())["weight_map"]
    assert weight_map[name] == f"model-{shard:05d}-of-00048.safetensors"


def test_a_hole_reads_as_zeros(flash_headers: Path) -> None:
    with open_checkpoint(flash_headers, without_engram=True) as checkpoint:
        assert not checkpoint.tensor("layers.39.attn_norm.weight").any()
        assert checkpoint.tensor("norm.weight").shape == (5120,)


def test_other_configs_have_fewer_shards(tmp_path: Path) -> None:
    report = synthesize_headers(TINY, tmp_path / "tiny")
    assert (report.tensors, len(report.files)) == (len(expected_tensors(TINY)), TINY.num_hidden_layers + 2)
    assert len(read_inventory(tmp_path / "tiny").tensors) == report.tensors


def test_a_file_system_without_holes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stood in for by a probe whose hole is filled: the check looks at the blocks that are really taken."""

    def fill(fd: int) -> None:
        os.posix_fallocate(fd, 0, os.fstat(fd).st_size)

    monkeypatch.setattr(os, "fsync", fill)
    monkeypatch.setattr(headers_only, "_PROBE_BYTES", 1 << 20)
    with pytest.raises(SparseFilesError, match="sparse files") as caught:
        synthesize_headers(FLASH, tmp_path / "out")
    assert caught.value.found == f"{1 << 20} bytes taken by a hole of {1 << 20}"
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_beside_other_files(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(SynthesisError):
        synthesize_headers(TINY, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert main(["synth", "--preset", "tiny8", "--headers-only", "--out", out]) == 0
    assert "headers of " in capsys.readouterr().out
    assert main(["inspect", out]) == 0
    assert main(["synth", "--preset", "flash", "--out", str(tmp_path / "more")]) == 2
    assert "a seed for the whole of flash, or --headers-only" in capsys.readouterr().err
    assert main(["synth", "--preset", "tiny", "--headers-only", "--seed", "3", "--out", str(tmp_path / "more")]) == 2
    assert "no seed with --headers-only" in capsys.readouterr().err
    assert main(["synth", "--preset", "tiny", "--headers-only", "--shards", "3", "--out", str(tmp_path / "more")]) == 2
    assert "--shards: expected none with --headers-only" in capsys.readouterr().err
    assert not (tmp_path / "more").exists()
