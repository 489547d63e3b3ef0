"""Payload that is no finite number: infinity and NaN in every format that has them, wherever bytes are read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from v41_config import ParallelLayout
from v41_loader import Inventory, open_checkpoint, open_shards, read_inventory, shard_checkpoint, verify_shards
from v41_loader.errors import NonFiniteWeightError, ScaleNanError
from v41_loader.finite_codes import require_finite
from v41_loader.header_entries import TensorEntry

TP4_DP2 = ParallelLayout(4, 2)

FAULTS = [
    ("layers.1.attn.wq_b.weight", "F8_E4M3", 0x7F),
    ("layers.1.attn.wo_b.weight", "F8_E4M3", 0xFF),
    ("layers.1.attn.wq_b.scale", "F8_E8M0", 0xFF),
    ("layers.2.ffn.experts.7.w1.scale", "F8_E8M0", 0xFF),
    ("embed.weight", "BF16", 0x7F80),
    ("head.weight", "BF16", 0xFF80),
    ("layers.3.attn_norm.weight", "BF16", 0x7FC0),
    ("layers.0.ffn.gate.weight", "BF16", 0xFFFF),
    ("layers.4.attn.attn_sink", "F32", 0x7F800000),
    ("layers.5.hc_attn_fn", "F32", 0xFF800000),
    ("layers.6.ffn.gate.bias", "F32", 0x7F800001),
    ("layers.0.hc_ffn_scale", "F32", 0xFFFFFFFF),
]
"""Tensor, format and code: infinities and NaN of both signs, replicated tensors and those that TP and EP part."""

ITEM_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F32": 4}


def error_of(dtype: str) -> type[Exception]:
    return ScaleNanError if dtype == "F8_E8M0" else NonFiniteWeightError


def put(path: Path, entry: TensorEntry, item: int, dtype: str, code: int) -> bytes:
    """Write one code into a file: the bytes of the whole tensor then."""
    data = bytearray(path.read_bytes())
    size = ITEM_BYTES[dtype]
    at = entry.begin + item * size
    assert at + size <= entry.end
    data[at : at + size] = code.to_bytes(size, "little")
    path.write_bytes(data)
    return bytes(data[entry.begin : entry.end])


def place(shape: tuple[int, ...]) -> tuple[int, list[int]]:
    """An item of a tensor that is neither first nor last where there are others, and its coordinates."""
    at = [size - 1 if d == 0 else size // 3 for d, size in enumerate(shape)]
    return int(np.ravel_multi_index(at, shape)), at


@pytest.mark.parametrize(("name", "dtype", "code"), FAULTS)
def test_a_code_of_a_checkpoint_that_is_no_number(
    damaged: Path, tmp_path: Path, name: str, dtype: str, code: int
) -> None:
    """A broken download that kept its size: refused where it is read, whole or in part, and where it is sharded."""
    stored = read_inventory(damaged).tensors[name]
    item, at = place(stored.expected.shape)
    put(damaged / stored.file, stored.entry, item, dtype, code)
    where = f"{name}{at} in {stored.file}"
    with open_checkpoint(damaged) as checkpoint:
        with pytest.raises(error_of(dtype)) as caught:
            checkpoint.tensor(name)
        assert (caught.value.where, caught.value.found) == (where, code)  # type: ignore[attr-defined]
        for axis in range(len(at)):
            with pytest.raises(error_of(dtype)) as caught:
                checkpoint.part(name, axis, at[axis], at[axis] + 1)
            assert caught.value.where == where  # type: ignore[attr-defined]
        assert checkpoint.part(name, 0, 0, at[0]).shape == (at[0], *stored.expected.shape[1:])
    with pytest.raises(error_of(dtype)) as caught:
        shard_checkpoint(read_inventory(damaged), tmp_path / "shards", TP4_DP2)
    assert caught.value.where == where  # type: ignore[attr-defined]
    assert not list((tmp_path / "shards").glob("rank-*"))


SHARD_FAULTS = [
    ("layers.1.attn.wq_b.weight", "F8_E4M3", 0xFF),
    ("layers.2.ffn.experts.1.w1.scale", "F8_E8M0", 0xFF),
    ("norm.weight", "BF16", 0x7FC0),
    ("layers.4.ffn.gate.bias", "F32", 0xFF800000),
]


@pytest.mark.parametrize("weight_layout", ["canonical", "device"])
@pytest.mark.parametrize(("name", "dtype", "code"), SHARD_FAULTS)
def test_a_code_of_a_rank_file_that_is_no_number(
    small_shards: dict[str, Path], tmp_path: Path, weight_layout: str, name: str, dtype: str, code: int,
    edit_manifest: Callable[..., None],
) -> None:  # fmt: skip
    """Even where the manifest vouches for the bytes, in either byte layout."""
    shards = Path(shutil.copytree(small_shards[weight_layout], tmp_path / "shards"))
    inventory = open_shards(shards, weight_layout).inventory
    (part, *_) = inventory.contents.parts[name]
    rank = part.ranks[0]
    entry = inventory.contents.entries[rank][name]
    path = shards / f"rank-{rank:02d}.safetensors"
    item, at = place(entry.shape)
    digest = xxhash.xxh3_128_hexdigest(put(path, entry, item, dtype, code))

    def vouch(document: dict[str, Any]) -> None:
        document["tensors"][name]["source" if part.transform is None else "stored"][0] = digest

    edit_manifest(shards, vouch)
    with pytest.raises(error_of(dtype)) as caught:
        open_shards(shards, weight_layout).tensor(rank, name)
    assert caught.value.where == f"{name}{at} in {path.name}"  # type: ignore[attr-defined]
    with pytest.raises(error_of(dtype)) as caught:
        verify_shards(shards)
    assert caught.value.where == f"{name}[{item}] in {path.name}"  # type: ignore[attr-defined]


def test_a_source_that_turned_bad_after_sharding(small_source: Inventory, tmp_path: Path) -> None:
    """`verify --source` looks at the source's numbers as it reads them again."""
    source = Path(shutil.copytree(small_source.directory, tmp_path / "source"))
    shard_checkpoint(read_inventory(source), tmp_path / "shards", ParallelLayout(2, 2))
    stored = read_inventory(source).tensors["norm.weight"]
    put(source / stored.file, stored.entry, 5, "BF16", 0x7F80)
    with pytest.raises(NonFiniteWeightError, match=r"norm\.weight\[5\]"):
        verify_shards(tmp_path / "shards", read_inventory(source))


@pytest.mark.parametrize(("dtype", "bits", "non_finite"), [
    ("F8_E8M0", 8, [0xFF]),
    ("F8_E4M3", 8, [0x7F, 0xFF]),
    ("BF16", 16, [*range(0x7F80, 0x8000), *range(0xFF80, 0x10000)]),
    ("I8", 8, []),
])  # fmt: skip
def test_every_code_is_judged_rightly(dtype: str, bits: int, non_finite: list[int]) -> None:
    """All codes of the format, each alone: the extreme finite ones pass, whatever stands beside them."""
    refused = []
    for code in range(1 << bits):
        data = np.frombuffer(code.to_bytes(bits // 8, "little"), np.uint8)
        try:
            require_finite(data, dtype, "t", "f", (1,))
        except (NonFiniteWeightError, ScaleNanError):
            refused.append(code)
    assert refused == non_finite


@given(st.lists(st.floats(width=32), max_size=20))
def test_fp32_as_the_machine_sees_it(values: list[float]) -> None:
    data = np.array(values, np.float32)
    finite = np.isfinite(data)
    if finite.all():
        require_finite(data.view(np.uint8), "F32", "t", "f", data.shape)
        return
    with pytest.raises(NonFiniteWeightError) as caught:
        require_finite(data.view(np.uint8), "F32", "t", "f", data.shape)
    assert caught.value.where == f"t[{finite.argmin()}] in f"


def test_a_code_behind_many_blocks() -> None:
    """Far into a tensor, where the comparison goes block by block: coordinates of the whole tensor."""
    codes = np.zeros((700, 1024), np.uint8)
    codes[699, 3] = 0xFF
    with pytest.raises(NonFiniteWeightError) as caught:
        require_finite(codes, "F8_E4M3", "t", "f", codes.shape, (5, 100))
    assert caught.value.where == "t[704, 103] in f"
