"""Opening and reading: every byte as the safetensors library reads it, whole or in part."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from v41_config import FLASH, TINY, ConfigError, ModelConfig
from v41_loader import expected_tensors, open_checkpoint, read_inventory
from v41_loader.errors import EngramCheckpointError, LinkEscapeError, ScaleNanError, ShardingError, UnknownTensorError
from v41_loader.inventory import NOT_COMPARABLE
from v41_loader.tensor_ranges import BAND_BYTES


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    a_bytes, b_bytes = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a_bytes, b_bytes)


def library_tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in sorted(directory.glob("*.safetensors")) for name, t in load_file(path).items()}


def rewrite(path: Path, **changes: torch.Tensor) -> None:
    """Replace tensors of a shard."""
    save_file(load_file(path) | changes, path)


def shard_of(directory: Path, name: str) -> Path:
    return next(path for path in directory.glob("*.safetensors") if name in load_file(path))


def test_every_tensor_reads_as_the_library_reads_it(tiny_checkpoint: Path) -> None:
    library = library_tensors(tiny_checkpoint)
    with open_checkpoint(tiny_checkpoint) as checkpoint:
        assert set(checkpoint.inventory.tensors) == set(library)
        for name, tensor in library.items():
            assert same_bytes(checkpoint.tensor(name), tensor), name
        names = ["embed.weight", "layers.3.attn.wo_b.scale"]
        read = checkpoint.read(names)
    assert list(read) == names
    assert all(same_bytes(read[name], library[name]) for name in names)


def test_same_bytes_rejects_a_difference() -> None:
    zero = torch.zeros(2, 2)
    assert not same_bytes(zero, -zero)
    assert not same_bytes(zero, zero.view(4))
    assert not same_bytes(zero, zero.view(torch.int32))


def test_names_leave_the_skipped_groups_out(tiny_checkpoint: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint)
    left_out = set(checkpoint.inventory.tensors) - set(checkpoint.names)
    assert left_out == {f"layers.{i}.ffn.gate.bias_vl" for i in range(10)}
    assert checkpoint.config == TINY
    assert checkpoint.inventory.notice is None
    assert checkpoint.tensor("layers.0.ffn.gate.bias_vl").shape == (16,)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_part_is_that_slice(tiny_checkpoint: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(expected_tensors(TINY))[::7]))
    checkpoint = open_checkpoint(tiny_checkpoint)
    whole = checkpoint.tensor(name)
    axis = data.draw(st.integers(0, whole.ndim - 1))
    start = data.draw(st.integers(0, whole.shape[axis]))
    stop = data.draw(st.integers(start, whole.shape[axis]))
    part = checkpoint.part(name, axis, start, stop)
    assert part.is_contiguous()
    assert same_bytes(part, whole.narrow(axis, start, stop - start))


def test_an_inner_part_is_read_through_a_bounded_band(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns = 3 * BAND_BYTES // 4096 + 5, 4096  # several bands and a rest
    config = TINY.model_validate({f: getattr(TINY, f) for f in ModelConfig.model_fields} | {"vocab_size": rows})
    tensor = torch.arange(rows * columns, dtype=torch.int32).to(torch.int8).reshape(rows, columns)
    save_file({"embed.weight": tensor}, tmp_path / "model.safetensors")
    monkeypatch.setattr("v41_loader.inventory._compare_with_config", lambda _c, held, _t: _as_stored(held.entries))
    checkpoint = open_checkpoint(tmp_path, config)
    tracemalloc.start()
    part = checkpoint.part("embed.weight", 1, 100, 200)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert torch.equal(part, tensor[:, 100:200])
    assert peak < part.numel() + BAND_BYTES + (64 << 10) < tensor.numel()


def _as_stored(entries: dict) -> dict:  # type: ignore[type-arg]
    from dataclasses import replace

    from v41_loader.inventory import StoredTensor

    expected = expected_tensors(TINY)["embed.weight"]
    (entry,) = entries.values()
    rule = replace(expected.rule, dtype="I8")
    return {"embed.weight": StoredTensor(expected._replace(shape=entry.shape, rule=rule), "model.safetensors", entry)}


@pytest.mark.parametrize(("axis", "start", "stop"), [(0, -1, 3), (0, 2, 1), (0, 0, 513), (2, 0, 1), (-1, 0, 1)])
def test_a_range_outside_the_tensor_is_refused(tiny_checkpoint: Path, axis: int, start: int, stop: int) -> None:
    with pytest.raises(ShardingError, match=r"embed\.weight"):
        open_checkpoint(tiny_checkpoint).part("embed.weight", axis, start, stop)


def test_tensors_own_their_memory(damaged: Path) -> None:
    checkpoint = open_checkpoint(damaged)
    first, second = checkpoint.tensor("norm.weight"), checkpoint.tensor("norm.weight")
    first.zero_()
    assert second.float().abs().sum() > 0
    shutil.rmtree(damaged)
    assert second.float().abs().sum() > 0


def test_a_single_file_is_a_checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> None:
    library = library_tensors(tiny_checkpoint)
    save_file(library, tmp_path / "model.safetensors")
    shutil.copy(tiny_checkpoint / "config.json", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.inventory.tensors) == set(library)
    assert same_bytes(checkpoint.tensor("head.weight"), library["head.weight"])


def test_a_config_can_be_given(damaged: Path) -> None:
    (damaged / "config.json").unlink()
    assert open_checkpoint(damaged, TINY).config == TINY


def test_another_models_config_is_refused(damaged: Path) -> None:
    text = (damaged / "config.json").read_text().replace('"deepseek_v41"', '"deepseek_v4"')
    (damaged / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="model_type"):
        open_checkpoint(damaged)


def test_every_scale_code_survives(damaged: Path) -> None:
    name = "layers.0.ffn.experts.0.w1.scale"  # [64, 8]: 512 codes
    codes = (torch.arange(512) % 255).to(torch.uint8).reshape(64, 8)
    rewrite(shard_of(damaged, name), **{name: codes.view(torch.float8_e8m0fnu)})
    scale = open_checkpoint(damaged).tensor(name)
    assert scale.dtype == torch.float8_e8m0fnu
    assert torch.equal(scale.to("cpu").view(torch.uint8), codes)


def test_a_nan_scale_is_refused_where_it_is_read(damaged: Path) -> None:
    name = "layers.2.attn.wq_b.scale"  # [16, 2]
    codes = torch.full((16, 2), 127, dtype=torch.uint8)
    codes[13, 1] = 255
    path = shard_of(damaged, name)
    rewrite(path, **{name: codes.view(torch.float8_e8m0fnu)})
    checkpoint = open_checkpoint(damaged)
    with pytest.raises(ScaleNanError) as caught:
        checkpoint.tensor(name)
    assert caught.value.where == f"{name}[13, 1] in {path.name}"
    assert checkpoint.part(name, 0, 0, 13).shape == (13, 2)


def test_an_unknown_name_is_an_error(tiny_checkpoint: Path) -> None:
    with pytest.raises(UnknownTensorError, match="nothing"):
        open_checkpoint(tiny_checkpoint).tensor("nothing")


def cached_checkpoint(source: Path, root: Path) -> Path:
    """A Hugging Face cache: the snapshot holds links to blobs beside it."""
    snapshot, blobs = root / "snapshots" / "main", root / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(source.iterdir())):
        shutil.copy(path, blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot


def test_links_inside_an_allowed_root_work(tiny_checkpoint: Path, tmp_path: Path) -> None:
    snapshot = cached_checkpoint(tiny_checkpoint, tmp_path / "cache")
    checkpoint = open_checkpoint(snapshot, allowed_root=tmp_path / "cache")
    assert same_bytes(checkpoint.tensor("norm.weight"), open_checkpoint(tiny_checkpoint).tensor("norm.weight"))
    with pytest.raises(LinkEscapeError, match=r"config\.json"):
        open_checkpoint(snapshot)


assert FLASH.engram
assert FLASH.drafting
assert FLASH.vision
ENGRAM = ModelConfig.model_validate(
    {f: getattr(TINY, f) for f in ModelConfig.model_fields}
    | {
        "engram": FLASH.engram.model_copy(update={"layer_ids": (1, 4), "num_embeddings": (96, 100)}),
        "drafting": FLASH.drafting.model_copy(update={"n_routed_experts": 4, "target_layer_ids": (7, 8, 9)}),
        "vision": FLASH.vision.model_copy(update={"num_hidden_layers": 2}),
        "image_token_id": 500,
    }
)
"""TINY with every group that text inference leaves out."""


def test_an_engram_checkpoint_must_be_opened_knowingly(
    write_headers: Callable[..., Path],
    tensors_of: Callable[..., dict],  # type: ignore[type-arg]
) -> None:
    directory = write_headers(ENGRAM, tensors_of(ENGRAM).values())
    with pytest.raises(EngramCheckpointError, match="without-engram"):
        open_checkpoint(directory)
    checkpoint = open_checkpoint(directory, without_engram=True)
    assert checkpoint.inventory.notice == NOT_COMPARABLE
    skipped = {total.group.value: total.tensors for total in checkpoint.inventory.group_totals() if total.skipped}
    assert skipped == {
        "router bias of image tokens": 10,
        "Engram": 12,
        "drafting": 3 * (30 + 4 * 6) + 7,
        "vision": 10 + 2 * 8,
    }
    assert set(checkpoint.names) == set(open_names(TINY))


def open_names(config: ModelConfig) -> list[str]:
    return [name for name, tensor in expected_tensors(config).items() if not tensor.skipped]


def test_checking_a_checkpoint_does_not_import_torch(tiny_checkpoint: Path) -> None:
    code = (
        "import sys, v41_loader, v41_loader.cli\n"
        f"assert len(v41_loader.read_inventory({str(tiny_checkpoint)!r}).tensors) == 1289\n"
        "assert 'torch' not in sys.modules\n"
        "v41_loader.open_checkpoint\n"
        "assert 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_group_totals_add_up(tiny_checkpoint: Path) -> None:
    totals = read_inventory(tiny_checkpoint).group_totals()
    assert sum(total.tensors for total in totals) == 1289
    assert sum(total.nbytes for total in totals) == 8_670_256
