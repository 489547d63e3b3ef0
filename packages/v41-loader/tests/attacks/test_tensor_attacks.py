"""Tensors that the config does not explain, or that index and headers disagree about: one for every rule."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from v41_config import FLASH6, TINY, ModelConfig
from v41_loader import expected_tensors, open_checkpoint, read_inventory
from v41_loader.errors import (
    CheckpointNotFoundError,
    DuplicateTensorError,
    IndexCoverageError,
    MissingTensorError,
    TensorDtypeError,
    TensorShapeError,
    TotalSizeError,
    UnknownTensorError,
)
from v41_loader.header import encode_header
from v41_loader.index import INDEX_FILE

HeaderTensor = tuple[str, str, tuple[int, ...]]
Tensors = dict[str, HeaderTensor]
WriteHeaders = Callable[..., Path]

SMALL = ModelConfig.model_validate(
    {f: getattr(TINY, f) for f in ModelConfig.model_fields} | {"n_routed_experts": 2, "num_experts_per_tok": 1}
)
EACH_KIND = list({tensor.rule.pattern: name for name, tensor in expected_tensors(SMALL).items()}.values())
"""The last tensor of each rule: of the last layer and expert that have it."""


@pytest.fixture
def tensors(tensors_of: Callable[[ModelConfig], Tensors]) -> Tensors:
    return tensors_of(SMALL)


def test_every_rule_of_text_inference_is_attacked() -> None:
    assert len(EACH_KIND) == 47
    assert "layers.9.ffn.experts.1.w2.scale" in EACH_KIND
    assert "layers.9.ffn.gate.bias_vl" in EACH_KIND


def test_undamaged_headers_open(write_headers: WriteHeaders, tensors: Tensors) -> None:
    """What the attacks start from is a good checkpoint."""
    assert len(read_inventory(write_headers(SMALL, tensors.values())).tensors) == len(tensors)


@pytest.mark.parametrize("name", EACH_KIND)
def test_a_tensor_is_missing(write_headers: WriteHeaders, tensors: Tensors, name: str) -> None:
    """One weight, scale or norm was lost in conversion."""
    del tensors[name]
    with pytest.raises(MissingTensorError) as caught:
        open_checkpoint(write_headers(SMALL, tensors.values()))
    assert caught.value.where == name


@pytest.mark.parametrize("name", EACH_KIND)
def test_a_tensor_is_renamed(write_headers: WriteHeaders, tensors: Tensors, name: str) -> None:
    """Another tool's spelling."""
    tensors[name] = ("model." + name, *tensors[name][1:])
    with pytest.raises(UnknownTensorError) as caught:
        open_checkpoint(write_headers(SMALL, tensors.values()))
    assert caught.value.where == f"model.{name} in model.safetensors"


@pytest.mark.parametrize("name", EACH_KIND)
def test_a_tensor_too_many(write_headers: WriteHeaders, tensors: Tensors, name: str) -> None:
    """A tensor of a layer that the config does not have; a scale without a weight among them."""
    extra = re.sub(r"^layers\.\d+", "layers.10", name) if name.startswith("layers.") else name + "_scale_inv"
    tensors[extra] = (extra, *tensors[name][1:])
    with pytest.raises(UnknownTensorError) as caught:
        open_checkpoint(write_headers(SMALL, tensors.values()))
    assert caught.value.found == extra


@pytest.mark.parametrize("name", EACH_KIND)
def test_a_tensor_in_two_shards(write_headers: WriteHeaders, tensors: Tensors, name: str) -> None:
    """Two versions of one tensor; the index picks one."""
    directory = write_headers(SMALL, tensors.values(), [tensors[name]])
    with pytest.raises(DuplicateTensorError) as caught:
        open_checkpoint(directory)
    assert caught.value.where == f"{name} in shard-1.safetensors"
    assert caught.value.found == "shard-0.safetensors"


@pytest.mark.parametrize("name", EACH_KIND)
def test_a_tensor_has_another_dtype(write_headers: WriteHeaders, tensors: Tensors, name: str) -> None:
    """Every other format of the release in its place, as a converter might leave it."""
    _, dtype, shape = tensors[name]
    other = {"F32": "BF16", "BF16": "F32", "F8_E4M3": "I8", "F8_E8M0": "I8", "I8": "F8_E4M3"}[dtype]
    tensors[name] = (name, other, shape)
    with pytest.raises(TensorDtypeError) as caught:
        open_checkpoint(write_headers(SMALL, tensors.values()))
    assert (caught.value.where, caught.value.found, caught.value.expected) == (
        f"{name} in model.safetensors", other, dtype)  # fmt: skip


@pytest.mark.parametrize("name", EACH_KIND)
def test_a_tensor_has_another_shape(write_headers: WriteHeaders, tensors: Tensors, name: str) -> None:
    """One row too many; and the same bytes in another shape, transposed where there are two dimensions."""
    _, dtype, shape = tensors[name]
    for wrong in ((shape[0] + 1, *shape[1:]), shape[::-1] if len(set(shape)) == 2 else (*shape, 1)):
        directory = write_headers(SMALL, (tensors | {name: (name, dtype, wrong)}).values())
        with pytest.raises(TensorShapeError) as caught:
            open_checkpoint(directory)
        assert caught.value.where == f"{name} in model.safetensors"
        assert caught.value.found == list(wrong)
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()


def test_a_dtype_the_release_does_not_use(write_headers: WriteHeaders, tensors: Tensors) -> None:
    """F16 where BF16 should be: the same bytes, other numbers."""
    directory = write_headers(SMALL, tensors.values())
    path = directory / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["norm.weight"]["dtype"] = "F16"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(TensorDtypeError, match=r"norm\.weight in model\.safetensors: expected BF16, found 'F16'"):
        open_checkpoint(directory)


def test_another_presets_config(write_headers: WriteHeaders, tensors: Tensors) -> None:
    """The config of one model beside the tensors of another."""
    with pytest.raises((TensorShapeError, MissingTensorError, UnknownTensorError)):
        open_checkpoint(write_headers(FLASH6, tensors.values()))


def index_of(tensors: Tensors, **changes: str) -> dict[str, str]:
    return dict.fromkeys(tensors, "shard-0.safetensors") | changes


def test_the_index_sends_a_tensor_to_a_shard_that_lacks_it(write_headers: WriteHeaders, tensors: Tensors) -> None:
    """Each file is sound; the map between them is not."""
    last = tensors.pop("norm.weight")
    weight_map = index_of(tensors, **{"norm.weight": "shard-0.safetensors", "embed.weight": "shard-1.safetensors"})
    with pytest.raises(IndexCoverageError, match=r"embed\.weight|norm\.weight") as caught:
        open_checkpoint(write_headers(SMALL, tensors.values(), [last], weight_map=weight_map))
    assert INDEX_FILE in caught.value.where


def test_the_index_knows_a_tensor_that_no_shard_has(write_headers: WriteHeaders, tensors: Tensors) -> None:
    """The index promises a tensor that is nowhere."""
    weight_map = index_of(tensors)
    del tensors["norm.weight"]
    with pytest.raises(IndexCoverageError) as caught:
        open_checkpoint(write_headers(SMALL, tensors.values(), weight_map=weight_map))
    assert caught.value.where == f"norm.weight in {INDEX_FILE}"


def test_a_shard_holds_a_tensor_that_the_index_omits(write_headers: WriteHeaders, tensors: Tensors) -> None:
    """A tensor hidden from readers that trust the index."""
    weight_map = index_of(tensors)
    del weight_map["norm.weight"]
    with pytest.raises(IndexCoverageError) as caught:
        open_checkpoint(write_headers(SMALL, tensors.values(), weight_map=weight_map))
    assert caught.value.where == "norm.weight in shard-0.safetensors"


def test_the_index_names_a_file_that_is_not_there(write_headers: WriteHeaders, tensors: Tensors) -> None:
    """A shard was not downloaded."""
    weight_map = index_of(tensors, **{"norm.weight": "shard-7.safetensors"})
    with pytest.raises(CheckpointNotFoundError) as caught:
        open_checkpoint(write_headers(SMALL, tensors.values(), weight_map=weight_map))
    assert caught.value.where.startswith("shard-7.safetensors in ")
    assert caught.value.expected == "a file, for norm.weight"


def test_a_total_size_that_is_not_the_sum(damaged: Path) -> None:
    """The index claims another number of bytes than its tensors have."""
    index = json.loads((damaged / INDEX_FILE).read_text())
    index["metadata"]["total_size"] += 1
    (damaged / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(TotalSizeError) as caught:
        open_checkpoint(damaged)
    assert caught.value.found == 8_670_257


def test_planning_needs_no_payload(write_headers: WriteHeaders, tensors: Tensors) -> None:
    """The check reads headers alone: a file with a hole for data is enough."""
    directory = write_headers(SMALL, tensors.values())
    header, _ = encode_header(tensors.values())
    assert (directory / "model.safetensors").stat().st_blocks * 512 < len(header) + (64 << 10)
    assert len(read_inventory(directory).tensors) == len(tensors)
