"""Sharded directories that were damaged, mixed up or made up: files, headers and manifest."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from v41_config import LayoutError, ParallelLayout
from v41_loader import Inventory, shard_checkpoint, verify_shards
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
    TensorDtypeError,
    TensorOffsetsError,
    TensorShapeError,
    TrailingBytesError,
    TruncatedFileError,
    UnknownLayoutError,
    UnknownTensorError,
    WeightLayoutError,
)

TP2_DP2 = ParallelLayout(2, 2)
Document = dict[str, Any]
Edit = Callable[..., None]


@pytest.fixture(params=["canonical", "device"])
def shards(request: pytest.FixtureRequest, small_shards: dict[str, Path], tmp_path: Path) -> Path:
    """Shards that a test may damage."""
    return Path(shutil.copytree(small_shards[request.param], tmp_path / "shards"))


def test_a_missing_rank(shards: Path) -> None:
    """A file of the manifest was not copied."""
    (shards / "rank-02.safetensors").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"rank-02\.safetensors"):
        verify_shards(shards)


def test_a_rank_that_was_never_made(small_source: Inventory, tmp_path: Path) -> None:
    """The directory is complete for those who wanted three ranks."""
    shard_checkpoint(small_source, tmp_path, TP2_DP2, ranks=[0, 1, 3])
    with pytest.raises(MissingRankError, match="rank 2"):
        verify_shards(tmp_path)


def test_a_stray_rank_file(shards: Path) -> None:
    """A rank too many, from another run."""
    shutil.copy(shards / "rank-00.safetensors", shards / "rank-04.safetensors")
    with pytest.raises(ManifestError, match=r"rank-04\.safetensors"):
        verify_shards(shards)


def test_ranks_that_changed_places(shards: Path) -> None:
    """Both files are sound, under each other's names."""
    one, two = shards / "rank-00.safetensors", shards / "rank-02.safetensors"
    one.rename(shards / "aside")
    two.rename(one)
    (shards / "aside").rename(two)
    with pytest.raises(CheckpointError, match=r"rank-00"):
        verify_shards(shards)


def test_a_file_that_is_cut_short_or_too_long(shards: Path) -> None:
    """A byte less, a byte more."""
    path = shards / "rank-01.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(TruncatedFileError, match="rank-01"):
        verify_shards(shards)
    path.write_bytes(data + b"\0")
    with pytest.raises(TrailingBytesError, match="rank-01"):
        verify_shards(shards)


def test_a_link_and_a_fifo(shards: Path, tmp_path: Path) -> None:
    """A rank file elsewhere, and one that nobody would ever finish reading."""
    path = shards / "rank-01.safetensors"
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(LinkEscapeError, match="rank-01"):
        verify_shards(shards)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(NotARegularFileError, match="rank-01"):
        verify_shards(shards)


def renamed(header: Document) -> None:
    last = max((entry["data_offsets"][1], name) for name, entry in header.items() if name != "__metadata__")[1]
    header["layers.9.norm.weight"] = header.pop(last)


def added(header: Document) -> None:
    end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    header["layers.9.norm.weight"] = {"dtype": "I8", "shape": [0], "data_offsets": [end, end]}


def other_dtype(header: Document) -> None:
    header["norm.weight"].update(dtype="F8_E4M3", shape=[512])


def other_shape(header: Document) -> None:
    header["norm.weight"].update(shape=[1, 256])


def exchanged(header: Document) -> None:
    """Two tensors of the same shape: names on each other's bytes."""
    one, two = header["layers.0.attn_norm.weight"], header["layers.0.ffn_norm.weight"]
    one["data_offsets"], two["data_offsets"] = two["data_offsets"], one["data_offsets"]


@pytest.mark.parametrize(("change", "error"), [
    (renamed, MissingTensorError), (added, UnknownTensorError), (other_dtype, TensorDtypeError),
    (other_shape, TensorShapeError), (exchanged, TensorOffsetsError),
])  # fmt: skip
def test_a_header_of_another_kind(
    canonical_shards: Path, edit_header: Edit, edit_manifest: Edit, change: Callable[[Document], None],
    error: type[CheckpointError],
) -> None:  # fmt: skip
    """The file is a sound one, and the manifest agrees with its size."""
    path = canonical_shards / "rank-03.safetensors"
    edit_header(path, lambda header, _: change(header))
    edit_manifest(canonical_shards, lambda document: document["shards"].update({path.name: path.stat().st_size}))
    with pytest.raises(error, match="rank-03"):
        verify_shards(canonical_shards)


def settings(**changes: object) -> Callable[[Document], object]:
    return lambda document: document["settings"].update(changes)


@pytest.mark.parametrize(("change", "error", "match"), [
    (lambda d: d.update(manifest_version=2), ManifestError, "manifest_version"),
    (lambda d: d.update(extra=1), ManifestError, "extra"),
    (lambda d: d.pop("tensors"), ManifestError, "tensors"),
    (settings(rules_version=0), ManifestError, "rules_version"),
    (settings(tp="2"), ManifestError, r"settings\.tp"),
    (settings(tp=0), ManifestError, r"settings\.tp"),
    (settings(tp=2**40), ManifestError, r"settings\.tp"),
    (settings(tp=2**30), LayoutError, "at most 4096 ranks"),
    (settings(tp=2048), LayoutError, "num_attention_heads"),
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
    canonical_shards: Path, edit_manifest: Edit, change: Callable[[Document], object], error: type[Exception],
    match: str,
) -> None:  # fmt: skip
    """Each field wrong in turn, and digests that are missing, too many, of another length or of another part."""
    edit_manifest(canonical_shards, change)
    with pytest.raises(error, match=match):
        verify_shards(canonical_shards)


def test_a_manifest_of_another_layout(small_shards: dict[str, Path], tmp_path: Path) -> None:
    """Canonical bytes that claim to be the device layout, and the other way round."""
    for mine, other in (("canonical", "device"), ("device", "canonical")):
        shards = Path(shutil.copytree(small_shards[mine], tmp_path / mine))
        shutil.copy(small_shards[other] / "manifest.json", shards)
        with pytest.raises(CheckpointError, match=r"manifest|rank-0"):
            verify_shards(shards)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b'{"manifest_version": 1e999}', b"[" * 100_000])
def test_a_manifest_that_is_none(canonical_shards: Path, text: bytes) -> None:
    """Empty, not an object, broken, not UTF-8, with a number that JSON does not have, too deep."""
    (canonical_shards / "manifest.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        verify_shards(canonical_shards)


def test_a_manifest_with_repeated_keys(canonical_shards: Path) -> None:
    """Two readers could each believe another one."""
    path = canonical_shards / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'{\n "manifest', b'{\n "manifest_version": 1,\n "manifest', 1))
    with pytest.raises(DuplicateKeyError, match="manifest_version"):
        verify_shards(canonical_shards)


def test_no_manifest_and_no_directory(canonical_shards: Path, tmp_path: Path) -> None:
    """Rank files alone are not shards."""
    (canonical_shards / "manifest.json").unlink()
    for directory in (canonical_shards, tmp_path / "nowhere"):
        with pytest.raises(ManifestError, match=r"no manifest\.json"):
            verify_shards(directory)


def test_a_config_that_is_not_the_one(canonical_shards: Path) -> None:
    """The same values in other bytes: not the file that the shards were made with."""
    path = canonical_shards / "config.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(DigestMismatchError, match=r"config\.json"):
        verify_shards(canonical_shards)
