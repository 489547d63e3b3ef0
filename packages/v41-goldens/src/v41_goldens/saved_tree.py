"""Operands and results of a run as files: `DIR/replicated` and `DIR/sharded`, a manifest and two safetensors each.

A tree belongs to one operator, preset and wiring. It is untrusted: nothing but the three files is opened, sizes are
known from the operator's contract before anything is read, and every file has to have the digest of the manifest.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from v41_config import BoundOperator, CountSpec, ModelConfig, OperatorSpec, ParallelLayout, find_operator
from v41_config.json_keys import read_json
from v41_config.validation_words import first_refusal
from v41_goldens.errors import TreeError

FORMAT_VERSION = 1
"""Changes with the layout of the files and with the arithmetic of the goldens: results of another one are refused."""

Wiring = Literal["replicated", "sharded"]

INPUTS, OUTPUTS, MANIFEST = "inputs.safetensors", "outputs.safetensors", "manifest.json"

_MANIFEST_LIMIT = 1 << 20
_HEADER_LIMIT = 16 << 20
"""Bytes that a manifest, and the header of a safetensors file, may have."""


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class _Manifest(BaseModel):
    """`extents` and `counts` are each rank's; constants are the model's, and not a tree's to choose."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format_version: int
    operator: str = Field(max_length=200)
    preset: str = Field(max_length=200)
    wiring: Wiring
    tp: int = Field(ge=1, le=64)
    dp: int = Field(ge=1, le=64)
    extents: list[dict[str, int]] = Field(max_length=4096)
    counts: list[dict[str, int]] = Field(max_length=4096)
    inputs: _File
    outputs: _File


@dataclass(frozen=True)
class SavedTree:
    """What a tree holds, by rank: contracts, arguments as they were before the run, destinations after it."""

    layout: ParallelLayout
    extents: tuple[dict[str, int], ...]
    bounds: tuple[BoundOperator, ...]
    arguments: tuple[dict[str, object], ...]
    outputs: tuple[dict[str, Tensor], ...]


def save_tree(
    directory: Path,
    preset: str,
    wiring: Wiring,
    spec: OperatorSpec,
    layout: ParallelLayout,
    extents: Sequence[Mapping[str, int]],
    arguments: Sequence[Mapping[str, object]],
    outputs: Sequence[Mapping[str, Tensor]],
) -> Path:
    """Write `directory/wiring`, whole or not at all; gives its path. `extents`: what each rank's contract is bound to.

    Raises:
        TreeError: there is one already, or it cannot be written.
    """
    place, counts = new_place(directory, wiring), _counts(spec)
    temporary = directory / f".{secrets.token_hex(8)}.partial"
    try:
        temporary.mkdir(parents=True)
        inputs = [{k: v for k, v in given.items() if isinstance(v, Tensor)} for given in arguments]
        for name, ranks in ((INPUTS, inputs), (OUTPUTS, outputs)):
            flat = {f"rank{r}.{k}": v.contiguous().clone() for r, part in enumerate(ranks) for k, v in part.items()}
            save_file(flat, temporary / name)
        manifest = _Manifest(
            format_version=FORMAT_VERSION,
            operator=spec.name,
            preset=preset,
            wiring=wiring,
            tp=layout.tp,
            dp=layout.dp,
            extents=[dict(sizes) for sizes in extents],
            counts=[
                {name: value for name, value in given.items() if name in counts and isinstance(value, int)}
                for given in arguments
            ],
            inputs=_described(temporary / INPUTS),
            outputs=_described(temporary / OUTPUTS),
        )
        (temporary / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n")
        os.replace(temporary, place)
    except (OSError, SafetensorError) as error:
        raise TreeError(str(place), str(error), "a directory that can be written") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return place


def new_place(directory: Path, wiring: Wiring) -> Path:
    """Where a tree of that wiring will stand. Errors: `TreeError` if something is there."""
    place = directory / wiring
    if os.path.lexists(place):
        raise TreeError(str(place), "something there", "a new directory")
    return place


def load_tree(directory: Path, operator: str, preset: str, config: ModelConfig, wiring: Wiring) -> SavedTree:
    """Read `directory/wiring`.

    Raises:
        TreeError: no tree, one of another operator, preset, wiring or version, or a file that is not what the manifest
            or the operator's contract says.
        V41Error: extents that the operator cannot have.
    """
    place = directory / wiring
    manifest = _read_manifest(place)
    asked = {"format_version": FORMAT_VERSION, "operator": operator, "preset": preset, "wiring": wiring}
    for name, expected in asked.items():
        if getattr(manifest, name) != expected:
            raise TreeError(f"{place / MANIFEST}: {name}", getattr(manifest, name), repr(expected))
    layout = ParallelLayout(manifest.tp, manifest.dp)
    for name in ("extents", "counts"):
        if len(getattr(manifest, name)) != layout.world_size:
            raise TreeError(f"{place / MANIFEST}: {name}", len(getattr(manifest, name)), f"{layout.world_size} ranks")
    spec = find_operator(operator)
    for counts in manifest.counts:
        if not set(counts) <= set(_counts(spec)):
            raise TreeError(f"{place / MANIFEST}: counts", sorted(counts), f"counts among {', '.join(_counts(spec))}")
    bounds = tuple(spec.bind(config, layout, **extents) for extents in manifest.extents)
    inputs = _read(place / INPUTS, manifest.inputs, bounds, [tensor.name for tensor in spec.tensors])
    outputs = _read(place / OUTPUTS, manifest.outputs, bounds, list(spec.destinations))
    arguments: list[dict[str, object]] = [{**t, **s} for t, s in zip(inputs, manifest.counts, strict=True)]
    for bound, given in zip(bounds, arguments, strict=True):
        bound.check(given)
    return SavedTree(layout, tuple(manifest.extents), bounds, tuple(arguments), outputs)


def _counts(spec: OperatorSpec) -> list[str]:
    return [scalar.name for scalar in spec.scalars if isinstance(scalar, CountSpec)]


def _read_manifest(place: Path) -> _Manifest:
    path = _inside(place, MANIFEST)
    content = read_json(path, _MANIFEST_LIMIT, "manifest of a saved tree", TreeError)
    try:
        return _Manifest.model_validate(content)
    except ValidationError as error:
        where, found, expected = first_refusal(error, "the file")
        raise TreeError(f"{path}: {where}", found, expected) from None


def _inside(place: Path, name: str) -> Path:
    """A regular file of the tree itself: a link could lead anywhere."""
    path = place / name
    if place.is_symlink() or path.is_symlink():
        raise TreeError(str(path), "a symbolic link", "a file of the tree itself")
    if not path.is_file():
        raise TreeError(str(path), "no such file", "a file of a saved tree")
    return path


def _read(
    path: Path, described: _File, bounds: Sequence[BoundOperator], names: Sequence[str]
) -> tuple[dict[str, Tensor], ...]:
    path = _inside(path.parent, path.name)
    wanted = {f"rank{rank}.{name}": bound.tensors[name] for rank, bound in enumerate(bounds) for name in names}
    payload, size = sum(tensor.nbytes for tensor in wanted.values()), path.stat().st_size
    if size != described.bytes or not payload < size <= payload + _HEADER_LIMIT:
        raise TreeError(str(path), f"{size} bytes", f"{described.bytes} bytes, of which {payload} are tensors")
    digest = _sha256(path)
    if digest != described.sha256:
        raise TreeError(f"{path}: SHA-256", digest, f"{described.sha256}, as the manifest has it")
    found: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            if set(file.keys()) != wanted.keys():
                odd = sorted(set(file.keys()) ^ wanted.keys())[0]
                raise TreeError(f"{path}: {odd}", "missing or unknown", "a tensor for each operand and rank")
            for name, tensor in wanted.items():
                value = file.get_tensor(name)
                if value.dtype != getattr(torch, tensor.spec.dtype) or tuple(value.shape) != tensor.shape:
                    raise TreeError(
                        f"{path}: {name}", (value.dtype, tuple(value.shape)), f"{tensor.spec} {tensor.shape}"
                    )
                found[name] = value
    except SafetensorError as error:
        raise TreeError(str(path), str(error), "a safetensors file") from error
    return tuple({name: found[f"rank{rank}.{name}"] for name in names} for rank in range(len(bounds)))


def _described(path: Path) -> _File:
    return _File(bytes=path.stat().st_size, sha256=_sha256(path))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()
