"""`manifest.json`: what a sharded directory holds, what it was made from and how, and the digest of every part."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from v41_config.validation_words import first_refusal
from v41_loader.digests import DigestAlgorithm
from v41_loader.errors import CheckpointNotFoundError, ManifestError
from v41_loader.index import MANIFEST_FILE
from v41_loader.source_files import read_document
from v41_loader.strict_json import parse_json_object

MANIFEST_VERSION: Literal[1] = 1

Count = Annotated[int, Field(ge=0, lt=2**63)]
Size = Annotated[int, Field(ge=1, lt=2**31)]
HexDigest = Annotated[str, Strict(), Field(pattern=r"^[0-9a-f]{32,64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class WeightLayoutId(_Strict):
    """The byte layout of the weights."""

    name: str
    version: int


class SourceState(_Strict):
    """A source file as it was read: changed since, and shards of it no longer belong to it."""

    nbytes: Count
    modified_ns: int


class ShardSettings(_Strict):
    """Everything that decides the bytes of a sharded directory, but for which ranks stand in it."""

    rules_version: int
    tp: Size
    dp: Size
    weight_layout: WeightLayoutId
    digest: DigestAlgorithm = Field(strict=False)
    config: HexDigest
    """Digest of `config.json`."""
    notice: str | None = None
    """What must be said of every result from these shards (`Inventory.notice`)."""

    def difference(self, other: ShardSettings) -> dict[str, object]:
        """The fields that differ from another's, as they are here. Digests by two algorithms say nothing about each
        other, so the config's is left out where the algorithms differ."""
        mine, theirs = self.model_dump(mode="json"), other.model_dump(mode="json")
        different = {field: value for field, value in mine.items() if theirs[field] != value}
        if "digest" in different:
            different.pop("config", None)
        return different


@pydantic_dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid", strict=False))
class PartDigests:
    """Digests of the parts of one tensor in their order; None for a part that no rank here holds. A run holds one for
    each of 96,085 tensors, so it is no `BaseModel`, which takes ten times the memory.

    `source` is of the bytes in the checkpoint, `stored` of those in the rank files where a layout transforms them;
    elsewhere the two are the same, and `stored` is absent.
    """

    source: tuple[HexDigest | None, ...]
    stored: tuple[HexDigest | None, ...] | None = None

    @property
    def in_rank_files(self) -> tuple[HexDigest | None, ...]:
        """Digests of the parts as rank files hold them."""
        return self.source if self.stored is None else self.stored


class Manifest(_Strict):
    """The whole document."""

    manifest_version: Literal[1]
    settings: ShardSettings
    sources: dict[str, SourceState]
    """The checkpoint's files that hold tensors of text inference."""
    shards: dict[str, Count]
    """The rank files that stand beside the manifest, and their bytes."""
    tensors: dict[str, PartDigests]

    def encode(self) -> bytes:
        """As it stands in the file."""
        return self.model_dump_json(indent=1, exclude_defaults=True).encode() + b"\n"


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a sharded directory, its form checked and nothing else.

    Raises:
        ManifestError: there is none, or it is not of this form and version.
        CheckpointError: as `read_document` and `parse_json_object`.
    """
    try:
        data = read_document(directory, MANIFEST_FILE)
    except CheckpointNotFoundError:
        raise ManifestError(
            str(directory), f"no {MANIFEST_FILE}", "a directory that v41-loader shard completed"
        ) from None
    document = parse_json_object(data, MANIFEST_FILE)
    if (version := document.get("manifest_version")) != MANIFEST_VERSION:
        raise ManifestError(f"{MANIFEST_FILE}: manifest_version", version, str(MANIFEST_VERSION))
    try:
        return Manifest.model_validate(document)
    except ValidationError as error:
        where, found, expected = first_refusal(error, "the file")
        raise ManifestError(f"{MANIFEST_FILE}: {where}", found, expected) from None
