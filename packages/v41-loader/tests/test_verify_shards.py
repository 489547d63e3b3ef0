"""Verification: whole shards pass, and every way in which they can fail to be their source is found and named."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from v41_config import FLASH, LayoutError, ParallelLayout
from v41_loader import (
    DigestAlgorithm,
    Inventory,
    expected_tensors,
    read_inventory,
    shard_checkpoint,
    synthesize_checkpoint,
    verify_shards,
)
from v41_loader.digests import digest_of
from v41_loader.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DigestMismatchError,
    DuplicateKeyError,
    LinkEscapeError,
    ManifestError,
    MissingRankError,
    MissingTensorError,
    NotARegularFileError,
    ScaleNanError,
    ScalePairingError,
    ShardCoverageError,
    TensorDtypeError,
    TensorOffsetsError,
    TensorShapeError,
    TrailingBytesError,
    TruncatedFileError,
    UnknownLayoutError,
    UnknownTensorError,
    WeightLayoutError,
)
from v41_loader.layouts import get_layout
from v41_loader.partition import RankPart
from v41_loader.sharding.coverage import require_scale_pairing, require_union
from v41_loader.sharding.rank_contents import RankContents, StoredPart, rank_contents

TP2_DP2 = ParallelLayout(2, 2)
SMALL = FLASH.scaled(
    hidden_size=256, num_hidden_layers=6, vocab_size=64, layout=TP2_DP2, moe_intermediate_size=256, n_routed_experts=4,
    num_experts_per_tok=2,
)  # fmt: skip
EXPERT_SCALE = "layers.2.ffn.experts.1.w1.scale"
"""On rank 1 alone."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Inventory:
    directory = tmp_path_factory.mktemp("small") / "checkpoint"
    synthesize_checkpoint(SMALL, 1, directory, shards=3)
    return read_inventory(directory)


@pytest.fixture(scope="module")
def whole(source: Inventory, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Shards in each layout; read only."""
    directory = tmp_path_factory.mktemp("whole")
    for weight_layout in ("canonical", "device"):
        shard_checkpoint(source, directory / weight_layout, TP2_DP2, weight_layout=weight_layout)
    return {path.name: path for path in directory.iterdir()}


@pytest.fixture(params=["canonical", "device"])
def shards(request: pytest.FixtureRequest, whole: dict[str, Path], tmp_path: Path) -> Path:
    """Shards that a test may damage."""
    return Path(shutil.copytree(whole[request.param], tmp_path / "shards"))


@pytest.fixture
def canonical(whole: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole["canonical"], tmp_path / "shards"))


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_header(path: Path, header: dict[str, Any], payload: bytes) -> None:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + payload)


def change_byte(path: Path, tensor: str, value: int | None = None) -> None:
    """Another value in the middle of a tensor."""
    header, payload = header_of(path)
    data = bytearray(payload)
    begin, end = header[tensor]["data_offsets"]
    middle = (begin + end) // 2
    data[middle] = data[middle] ^ 1 if value is None else value
    write_header(path, header, bytes(data))


def change_manifest(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("with_source", [False, True])
def test_whole_shards_pass(shards: Path, source: Inventory, with_source: bool) -> None:
    calls: list[tuple[int, int]] = []
    report = verify_shards(
        shards, source if with_source else None, progress=lambda *call: calls.append(call), threads=3
    )
    assert (report.ranks, report.union) == ((0, 1, 2, 3), True)
    assert report.source == (source.directory if with_source else None)
    assert sum(nbytes for nbytes, _ in calls) == calls[0][1]
    groups = {group.group.value: group for group in report.groups}
    read = [tensor for tensor in expected_tensors(SMALL).values() if not tensor.skipped]
    assert sum(group.tensors for group in groups.values()) == len(read)
    assert sum(group.nbytes for group in groups.values()) == sum(tensor.nbytes for tensor in read)
    assert groups["routed experts"].scales == 6 * 4 * 3
    assert [total.group.value for total in report.skipped] == ["router bias of image tokens"]


def test_sha256_shards_pass(source: Inventory, tmp_path: Path) -> None:
    shard_checkpoint(source, tmp_path, TP2_DP2, weight_layout="device", digest=DigestAlgorithm.SHA256)
    assert verify_shards(tmp_path, source).union
    change_byte(tmp_path / "rank-03.safetensors", "norm.weight")
    with pytest.raises(DigestMismatchError, match=r"norm\.weight"):
        verify_shards(tmp_path)


def test_some_ranks_leave_the_union_open(shards: Path, source: Inventory) -> None:
    change_byte(shards / "rank-03.safetensors", "norm.weight")
    report = verify_shards(shards, source, ranks=[0, 2])
    assert (report.ranks, report.union) == ((0, 2), False)
    with pytest.raises(DigestMismatchError, match=r"norm\.weight in rank-03"):
        verify_shards(shards, source, ranks=[2, 3])
    with pytest.raises(MissingRankError, match="rank 4"):
        verify_shards(shards, ranks=[4])


@pytest.mark.parametrize("name", sorted(
    {tensor.rule.pattern: name for name, tensor in expected_tensors(SMALL).items() if not tensor.skipped}.values()
))  # fmt: skip
def test_one_changed_byte_in_each_kind_of_tensor(canonical: Path, name: str) -> None:
    rank = next(r for r in (3, 2, 1, 0) if name in header_of(canonical / f"rank-0{r}.safetensors")[0])
    change_byte(canonical / f"rank-0{rank}.safetensors", name)
    with pytest.raises(DigestMismatchError) as caught:
        verify_shards(canonical, threads=1)
    assert caught.value.where == f"{name} in rank-0{rank}.safetensors"


@pytest.mark.parametrize("name", ["layers.3.attn.wq_b.weight", "layers.3.attn.wo_b.scale", EXPERT_SCALE])
def test_one_changed_byte_in_the_device_layout(whole: dict[str, Path], tmp_path: Path, name: str) -> None:
    shards = Path(shutil.copytree(whole["device"], tmp_path / "shards"))
    change_byte(shards / "rank-01.safetensors", name)
    with pytest.raises((DigestMismatchError, WeightLayoutError), match=name):
        verify_shards(shards)


def test_a_transform_that_loses_something_is_found(
    whole: dict[str, Path], source: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that have the digest they were written with, but are not an image of the source's."""
    from v41_loader.layouts.device import Fp4Tiles

    apply = Fp4Tiles.apply

    def lossy(self: Fp4Tiles, block: Any) -> Any:
        tiles = apply(self, block)
        tiles[..., 0] = 0
        return tiles

    monkeypatch.setattr(Fp4Tiles, "apply", lossy)
    shard_checkpoint(source, tmp_path / "out", TP2_DP2, weight_layout="device")
    with pytest.raises(DigestMismatchError, match=r"experts\..*in the released form"):
        verify_shards(tmp_path / "out")


def test_another_source_is_found(whole: dict[str, Path], source: Inventory, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(source.directory, other)
    stored = source.tensors["layers.4.attn.wo_b.weight"]
    data = bytearray((other / stored.file).read_bytes())
    data[stored.entry.end - 1] ^= 1  # the last column: the second TP rank's
    (other / stored.file).write_bytes(data)
    for shards in whole.values():
        assert verify_shards(shards).union
        with pytest.raises(DigestMismatchError, match=r"part 1 of layers\.4\.attn\.wo_b\.weight in .*other"):
            verify_shards(shards, read_inventory(other))


def test_a_source_of_another_model_is_found(whole: dict[str, Path], tiny_checkpoint: Path) -> None:
    with pytest.raises(DigestMismatchError, match="another config"):
        verify_shards(whole["canonical"], read_inventory(tiny_checkpoint))


def test_a_nan_scale_is_found(canonical: Path) -> None:
    """Even where the manifest vouches for it."""
    path = canonical / "rank-01.safetensors"
    change_byte(path, EXPERT_SCALE, 255)
    header, payload = header_of(path)
    begin, end = header[EXPERT_SCALE]["data_offsets"]
    digest = digest_of(payload[begin:end], DigestAlgorithm.XXH3_128)
    change_manifest(canonical, lambda document: document["tensors"][EXPERT_SCALE].update(source=[digest]))
    with pytest.raises(ScaleNanError) as caught:
        verify_shards(canonical)
    assert caught.value.where == f"{EXPERT_SCALE}[{(end - begin) // 2}] in rank-01.safetensors"


# Files


def test_a_missing_rank(shards: Path) -> None:
    (shards / "rank-02.safetensors").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"rank-02\.safetensors"):
        verify_shards(shards)


def test_a_rank_that_was_never_made(source: Inventory, tmp_path: Path) -> None:
    shard_checkpoint(source, tmp_path, TP2_DP2, ranks=[0, 1, 3])
    with pytest.raises(MissingRankError, match="rank 2"):
        verify_shards(tmp_path)


def test_a_stray_rank_file(shards: Path) -> None:
    shutil.copy(shards / "rank-00.safetensors", shards / "rank-04.safetensors")
    with pytest.raises(ManifestError, match=r"rank-04\.safetensors"):
        verify_shards(shards)


def test_ranks_that_changed_places(shards: Path) -> None:
    one, two = shards / "rank-00.safetensors", shards / "rank-02.safetensors"
    one.rename(shards / "aside")
    two.rename(one)
    (shards / "aside").rename(two)
    with pytest.raises(CheckpointError, match=r"rank-00"):
        verify_shards(shards)


def test_a_file_that_is_cut_short_or_too_long(shards: Path) -> None:
    path = shards / "rank-01.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(TruncatedFileError, match="rank-01"):
        verify_shards(shards)
    path.write_bytes(data + b"\0")
    with pytest.raises(TrailingBytesError, match="rank-01"):
        verify_shards(shards)


def test_a_link_and_a_fifo(shards: Path, tmp_path: Path) -> None:
    path = shards / "rank-01.safetensors"
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(LinkEscapeError, match="rank-01"):
        verify_shards(shards)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(NotARegularFileError, match="rank-01"):
        verify_shards(shards)


def without_norm(header: dict[str, Any]) -> None:
    last = max((v["data_offsets"][1], k) for k, v in header.items() if k != "__metadata__")[1]
    header["layers.9.norm.weight"] = header.pop(last)


def other_dtype(header: dict[str, Any]) -> None:
    header["norm.weight"].update(dtype="F8_E4M3", shape=[512])


def other_shape(header: dict[str, Any]) -> None:
    header["norm.weight"].update(shape=[1, 256])


def exchanged(header: dict[str, Any]) -> None:
    """Two tensors of the same shape: names on each other's bytes."""
    one, two = header["layers.0.attn_norm.weight"], header["layers.0.ffn_norm.weight"]
    one["data_offsets"], two["data_offsets"] = two["data_offsets"], one["data_offsets"]


@pytest.mark.parametrize(("change", "error"), [
    (without_norm, MissingTensorError), (other_dtype, TensorDtypeError), (other_shape, TensorShapeError),
    (exchanged, TensorOffsetsError),
])  # fmt: skip
def test_a_header_of_another_kind(
    canonical: Path, change: Callable[[dict[str, Any]], None], error: type[CheckpointError]
) -> None:
    path = canonical / "rank-03.safetensors"
    header, payload = header_of(path)
    change(header)
    write_header(path, header, payload)
    change_manifest(canonical, lambda document: document["shards"].update({path.name: path.stat().st_size}))
    with pytest.raises(error, match="rank-03"):
        verify_shards(canonical)


# The manifest


def settings(**changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda document: document["settings"].update(changes)


@pytest.mark.parametrize(("change", "error", "match"), [
    (lambda d: d.update(manifest_version=2), ManifestError, "manifest_version"),
    (lambda d: d.update(extra=1), ManifestError, "extra"),
    (lambda d: d.pop("tensors"), ManifestError, "tensors"),
    (settings(rules_version=0), ManifestError, "rules_version"),
    (settings(tp="2"), ManifestError, r"settings\.tp"),
    (settings(tp=0), ManifestError, r"settings\.tp"),
    (settings(tp=2**40), ManifestError, r"settings\.tp"),
    (settings(tp=2**30), LayoutError, "divides"),
    (settings(tp=1, dp=1), ManifestError, "shards"),
    (settings(dp=1), ManifestError, "shards"),
    (settings(digest="md5"), ManifestError, "digest"),
    (settings(digest="sha256"), DigestMismatchError, "config"),
    (settings(config="0" * 32), DigestMismatchError, "config"),
    (settings(weight_layout={"name": "rowwise", "version": 1}), UnknownLayoutError, "rowwise"),
    (settings(weight_layout={"name": "canonical", "version": 2}), WeightLayoutError, "version 2"),
    (lambda d: d["shards"].update({"../rank-00.safetensors": 1}), ManifestError, "rank-00"),
    (lambda d: d["shards"].update({"rank-01.safetensors": 1}), ManifestError, "rank-01"),
    (lambda d: d["shards"].pop("rank-01.safetensors"), ManifestError, "rank-01"),
    (lambda d: d["tensors"].pop("norm.weight"), MissingTensorError, r"norm\.weight"),
    (lambda d: d["tensors"].update(other=d["tensors"]["norm.weight"]), UnknownTensorError, "other"),
    (lambda d: d["tensors"]["norm.weight"].update(source=[]), ManifestError, r"norm\.weight"),
    (lambda d: d["tensors"]["norm.weight"].update(source=[None]), ManifestError, r"norm\.weight"),
    (lambda d: d["tensors"]["norm.weight"].update(source=["0" * 64]), ManifestError, r"norm\.weight"),
    (lambda d: d["tensors"]["norm.weight"].update(source=["x" * 32]), ManifestError, r"norm\.weight"),
    (lambda d: d["tensors"]["norm.weight"].update(source=["0" * 32]), DigestMismatchError, r"norm\.weight"),
    (lambda d: d["tensors"]["norm.weight"].update(stored=["0" * 32]), ManifestError, r"norm\.weight"),
    (lambda d: d["tensors"]["head.weight"]["source"].reverse(), DigestMismatchError, r"head\.weight"),
])  # fmt: skip
def test_a_manifest_that_does_not_fit(
    canonical: Path, change: Callable[[dict[str, Any]], object], error: type[Exception], match: str
) -> None:
    change_manifest(canonical, change)
    with pytest.raises(error, match=match):
        verify_shards(canonical)


def test_a_manifest_of_another_layout(whole: dict[str, Path], tmp_path: Path) -> None:
    """Canonical bytes that claim to be the device layout, and the other way round."""
    for mine, other in (("canonical", "device"), ("device", "canonical")):
        shards = Path(shutil.copytree(whole[mine], tmp_path / mine))
        shutil.copy(whole[other] / "manifest.json", shards)
        with pytest.raises(CheckpointError, match=r"manifest|rank-0"):
            verify_shards(shards)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b'{"manifest_version": 1e999}', b"[" * 100_000])
def test_a_manifest_that_is_none(canonical: Path, text: bytes) -> None:
    (canonical / "manifest.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        verify_shards(canonical)


def test_a_manifest_with_repeated_keys(canonical: Path) -> None:
    path = canonical / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'{\n "manifest', b'{\n "manifest_version": 1,\n "manifest', 1))
    with pytest.raises(DuplicateKeyError, match="manifest_version"):
        verify_shards(canonical)


def test_no_manifest_and_no_directory(canonical: Path, tmp_path: Path) -> None:
    (canonical / "manifest.json").unlink()
    for directory in (canonical, tmp_path / "nowhere"):
        with pytest.raises(ManifestError, match=r"no manifest\.json"):
            verify_shards(directory)


def test_a_config_that_is_not_the_one(canonical: Path) -> None:
    path = canonical / "config.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(DigestMismatchError, match=r"config\.json"):
        verify_shards(canonical)


# The proofs themselves


@pytest.fixture(scope="module")
def held() -> RankContents:
    return rank_contents(SMALL, TP2_DP2, range(4), get_layout("canonical"))


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
