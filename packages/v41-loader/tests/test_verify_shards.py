"""Verification: whole shards pass, and every way in which they can fail to be their source is found and named."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from v41_config import ParallelLayout
from v41_loader import (
    DigestAlgorithm,
    Inventory,
    expected_tensors,
    read_inventory,
    shard_checkpoint,
    tensor_parts,
    verify_shards,
)
from v41_loader.digests import digest_of
from v41_loader.errors import (
    DigestMismatchError,
    MissingRankError,
    ScaleNanError,
    ScalePairingError,
    ShardCoverageError,
    WeightLayoutError,
)
from v41_loader.layouts import get_layout
from v41_loader.partition import RankPart
from v41_loader.rules import RULES, Partition
from v41_loader.sharding.coverage import require_scale_pairing, require_union
from v41_loader.sharding.rank_contents import RankContents, StoredPart, rank_contents

TP2_DP2 = ParallelLayout(2, 2)
EXPERT_SCALE = "layers.2.ffn.experts.1.w1.scale"
"""On rank 1 alone."""

Edit = Callable[..., None]


@pytest.fixture(params=["canonical", "device"])
def shards(request: pytest.FixtureRequest, small_shards: dict[str, Path], tmp_path: Path) -> Path:
    """Shards that a test may damage."""
    return Path(shutil.copytree(small_shards[request.param], tmp_path / "shards"))


@pytest.fixture
def change_byte(edit_header: Edit) -> Edit:
    """Another value in the middle of a tensor."""

    def change(path: Path, tensor: str, value: int | None = None) -> None:
        def edit(header: dict[str, Any], payload: bytearray) -> None:
            middle = sum(header[tensor]["data_offsets"]) // 2
            payload[middle] = payload[middle] ^ 1 if value is None else value

        edit_header(path, edit)

    return change


@pytest.mark.parametrize("with_source", [False, True])
def test_whole_shards_pass(shards: Path, small_source: Inventory, with_source: bool) -> None:
    calls: list[tuple[int, int]] = []
    report = verify_shards(
        shards, small_source if with_source else None, progress=lambda *call: calls.append(call), threads=3
    )
    assert (report.ranks, report.union) == ((0, 1, 2, 3), True)
    assert report.source == (small_source.directory if with_source else None)
    assert sum(nbytes for nbytes, _ in calls) == calls[0][1]
    groups = {group.group.value: group for group in report.groups}
    read = [tensor for tensor in expected_tensors(small_source.config).values() if not tensor.skipped]
    assert sum(group.tensors for group in groups.values()) == len(read)
    assert sum(group.nbytes for group in groups.values()) == sum(tensor.nbytes for tensor in read)
    assert groups["routed experts"].scales == 6 * 4 * 3
    assert [total.group.value for total in report.skipped] == ["router bias of image tokens"]


def test_sha256_shards_pass(small_source: Inventory, tmp_path: Path, change_byte: Edit) -> None:
    shard_checkpoint(small_source, tmp_path, TP2_DP2, weight_layout="device", digest=DigestAlgorithm.SHA256)
    assert verify_shards(tmp_path, small_source).union
    change_byte(tmp_path / "rank-03.safetensors", "norm.weight")
    with pytest.raises(DigestMismatchError, match=r"norm\.weight"):
        verify_shards(tmp_path)


def test_some_ranks_leave_the_union_open(shards: Path, small_source: Inventory, change_byte: Edit) -> None:
    change_byte(shards / "rank-03.safetensors", "norm.weight")
    report = verify_shards(shards, small_source, ranks=[0, 2])
    assert (report.ranks, report.union) == ((0, 2), False)
    with pytest.raises(DigestMismatchError, match=r"norm\.weight in rank-03"):
        verify_shards(shards, small_source, ranks=[2, 3])
    with pytest.raises(MissingRankError, match="rank 4"):
        verify_shards(shards, ranks=[4])


@pytest.mark.parametrize("pattern", [rule.pattern for rule in RULES if rule.partition is not Partition.SKIPPED])
def test_one_changed_byte_in_each_kind_of_tensor(
    canonical_shards: Path, small_source: Inventory, change_byte: Edit, pattern: str
) -> None:
    tensors = expected_tensors(small_source.config)
    name = [name for name, tensor in tensors.items() if tensor.rule.pattern == pattern][-1]
    rank = tensor_parts(tensors[name], small_source.config, TP2_DP2)[-1].ranks[-1]
    change_byte(canonical_shards / f"rank-0{rank}.safetensors", name)
    with pytest.raises(DigestMismatchError) as caught:
        verify_shards(canonical_shards, threads=1)
    assert caught.value.where == f"{name} in rank-0{rank}.safetensors"


@pytest.mark.parametrize("name", ["layers.3.attn.wq_b.weight", "layers.3.attn.wo_b.scale", EXPERT_SCALE])
def test_one_changed_byte_in_the_device_layout(
    small_shards: dict[str, Path], tmp_path: Path, change_byte: Edit, name: str
) -> None:
    shards = Path(shutil.copytree(small_shards["device"], tmp_path / "shards"))
    change_byte(shards / "rank-01.safetensors", name)
    with pytest.raises((DigestMismatchError, WeightLayoutError), match=name):
        verify_shards(shards)


def test_a_transform_that_loses_something_is_found(
    small_shards: dict[str, Path], small_source: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that have the digest they were written with, but are not an image of the source's."""
    from v41_loader.layouts.device import Fp4Tiles

    apply = Fp4Tiles.apply

    def lossy(self: Fp4Tiles, block: Any) -> Any:
        tiles = apply(self, block)
        tiles[..., 0] = 0
        return tiles

    monkeypatch.setattr(Fp4Tiles, "apply", lossy)
    shard_checkpoint(small_source, tmp_path / "out", TP2_DP2, weight_layout="device")
    with pytest.raises(DigestMismatchError, match=r"experts\..*in the released form"):
        verify_shards(tmp_path / "out")


def test_another_source_is_found(small_shards: dict[str, Path], small_source: Inventory, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(small_source.directory, other)
    stored = small_source.tensors["layers.4.attn.wo_b.weight"]
    data = bytearray((other / stored.file).read_bytes())
    data[stored.entry.end - 1] ^= 1  # the last column: the second TP rank's
    (other / stored.file).write_bytes(data)
    for shards in small_shards.values():
        assert verify_shards(shards).union
        with pytest.raises(DigestMismatchError, match=r"part 1 of layers\.4\.attn\.wo_b\.weight in .*other"):
            verify_shards(shards, read_inventory(other))


def test_a_source_of_another_model_is_found(small_shards: dict[str, Path], tiny_checkpoint: Path) -> None:
    with pytest.raises(DigestMismatchError, match="another config"):
        verify_shards(small_shards["canonical"], read_inventory(tiny_checkpoint))


def test_a_nan_scale_is_found(
    canonical_shards: Path, change_byte: Edit, edit_header: Edit, edit_manifest: Edit
) -> None:
    """Even where the manifest vouches for it."""
    path = canonical_shards / "rank-01.safetensors"
    change_byte(path, EXPERT_SCALE, 255)
    found: list[bytes] = []

    def look(header: dict[str, Any], payload: bytearray) -> None:
        found.append(bytes(payload[slice(*header[EXPERT_SCALE]["data_offsets"])]))

    edit_header(path, look)
    digest = digest_of(found[0], DigestAlgorithm.XXH3_128)
    edit_manifest(canonical_shards, lambda document: document["tensors"][EXPERT_SCALE].update(source=[digest]))
    with pytest.raises(ScaleNanError) as caught:
        verify_shards(canonical_shards)
    assert caught.value.where == f"{EXPERT_SCALE}[{found[0].index(255)}] in rank-01.safetensors"


@pytest.fixture(scope="module")
def held(small_source: Inventory) -> RankContents:
    return rank_contents(small_source.config, TP2_DP2, range(4), get_layout("canonical"))


def moved(part: StoredPart, /, **changes: Any) -> StoredPart:
    return dataclasses.replace(part, **changes)


@pytest.mark.parametrize("name", ["embed.weight", "layers.0.attn.wo_b.scale", "norm.weight", EXPERT_SCALE])
def test_parts_that_are_not_the_whole_are_refused(held: RankContents, name: str) -> None:
    parts = held.parts[name]
    require_union(parts, TP2_DP2)
    first, rest = parts[0], parts[1:]
    wrong: list[tuple[StoredPart, ...]] = [
        (moved(first, ranks=first.ranks[:-1]), *rest),  # a rank without its part
        (moved(first, ranks=(*first.ranks, first.ranks[-1])), *rest),  # a rank twice
        (moved(first, part=RankPart((1, 1), 0, 0, 1)), *rest),  # less than its part
    ]
    if rest:
        start, stop, axis = first.part.start, first.part.stop, first.part.axis
        wrong += [
            (moved(first, part=RankPart(first.part.shape, axis, start + 1, stop)), *rest),  # a gap before
            (moved(first, part=RankPart(first.part.shape, axis, start, stop - 1)), *rest),  # a gap between
            (moved(first, part=RankPart(first.part.shape, axis, start, stop + 1)), *rest),  # an overlap
            (
                first,
                moved(rest[0], part=RankPart(first.part.shape, axis, stop, 2 * stop - 1)),
            ),  # a gap behind
            (moved(first, part=RankPart(first.part.shape, 1 - (axis or 0), start, stop)), *rest),  # another dimension
        ]
    for parts in wrong:
        with pytest.raises(ShardCoverageError, match=name):
            require_union(parts, TP2_DP2)


@pytest.mark.parametrize("name", ["layers.0.attn.wo_b", "layers.0.attn.wq_b", "layers.2.ffn.experts.1.w1"])
def test_scales_apart_from_their_weights_are_refused(held: RankContents, name: str) -> None:
    scale, weight = held.parts[f"{name}.scale"], held.parts[f"{name}.weight"]
    for parts in held.parts.values():
        require_scale_pairing(parts, held.parts)
    wrong = [{}, {f"{name}.weight": (moved(weight[0], ranks=(3,)), *weight[1:])}]
    if scale[0].part.axis is not None:
        wrong.append({f"{name}.weight": (moved(weight[0], part=weight[1].part), *weight[1:])})
    for all_parts in wrong:
        with pytest.raises(ScalePairingError, match=name):
            require_scale_pairing(scale, all_parts)
