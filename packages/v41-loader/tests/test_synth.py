"""Synthetic checkpoints against digests of the published generator, and its recipe against a plain transcription."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from v41_config import FLASH, FLASH6, TINY, ModelConfig, V41Error
from v41_loader import SynthesisError, expected_tensors, synthesize_checkpoint, synthesize_tensor
from v41_loader.errors import UnknownTensorError
from v41_loader.synth import checkpoint_writer, row_bands

TINY_DIGESTS = {
    "config.json": "8e7726d0294e0f69410e326d4daa47d1ae623a3c8c75e77a3588580c5982fc1a",
    "model-00001-of-00006.safetensors": "0f89dc06c166f0136e4f3b3ae8b03566fd024aa9b7e2b3ea1cf757822ca8f971",
    "model-00002-of-00006.safetensors": "136b69a12f79ecf039a3f4ab887f0505c1ffeff4dcad7bbeb03879e8dd1987e5",
    "model-00003-of-00006.safetensors": "7e88b9b3092e55992fb6e23c66850246b61e05e88958c094f4182d4f79494737",
    "model-00004-of-00006.safetensors": "51001b2340332388c2de3ebdde02476aa67094583ed31c6a5538c7d7f844198c",
    "model-00005-of-00006.safetensors": "cc6c5318ece7b5b5ec0baf975a55c2c501a05c5bd358d0aa33ec67d4cda769d2",
    "model-00006-of-00006.safetensors": "b0ec66778830498b9cbd27b165b44dcadd789639299c407c5cdad47f0524c7bf",
    "model.safetensors.index.json": "12faa984b98ef4f2385e85bc6793c3469ada4791ba2f568bc0f15dda48f13728",
}
"""sha256 of the published TINY checkpoint, seed 4105, six shards."""

FLASH6_SHARD_DIGESTS = (
    "d3631a3187cfa946e2796eca9bb167c55381790c8daa1716f252dde3cdf833fa",
    "c384ef59eb415686bda986e065f3b4bdfb19118df871a1f325b989a2de0dfdd9",
    "55cea75b5d63205bb195c13b288009caf92a41b303a7590f1c59da5fe08628fe",
    "4120aff1d704944c10412f4e21049a2c3ac4b88eab9f6e4a94d28764900b8820",
    "e12726a1582b6e4076f65f6e070f346164790bdc9e1dbc9db023b8235337f573",
    "e4ee4d4b6d6c1d1352956bf763770da8fd108fce0ff77503b623980496e07c93",
)
"""sha256 of the published FLASH6 shards, seed 51."""


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def stored_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_tiny_is_the_published_checkpoint(tiny_checkpoint: Path) -> None:
    assert digests(tiny_checkpoint) == TINY_DIGESTS


def test_files_do_not_depend_on_threads_or_band_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_bands, "BAND_ELEMENTS", 1 << 13)
    monkeypatch.setattr(row_bands, "BLOCK_ELEMENTS", 1 << 9)
    synthesize_checkpoint(TINY, 4105, tmp_path / "one", threads=1)
    assert digests(tmp_path / "one") == TINY_DIGESTS


@pytest.mark.conform
def test_flash6_is_the_published_checkpoint(tmp_path: Path) -> None:
    synthesize_checkpoint(FLASH6, 51, tmp_path / "flash6")
    found = digests(tmp_path / "flash6")
    assert [digest for name, digest in found.items() if name.endswith(".safetensors")] == list(FLASH6_SHARD_DIGESTS)


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("layers.2.attn.wkv.weight", "154ba736ee6a5085eb2c033f127a82f57d1e882c9ab6773e0f46b9f12e87faaa"),
        ("layers.2.attn.wkv.scale", "50aebf1a192f700c98b45d051205a0aa60dbe0a81de708bc68c6d88be15458fe"),
        ("layers.5.ffn.experts.7.w2.weight", "d1584fc7789ea75a0c5d8e5a9ca2848b03f0c7dab5f8905e72f3f75aaa0ea175"),
        ("layers.5.ffn.experts.7.w2.scale", "d4d3c063b2367145966d697256b88169ac5a138efe3b5444a310663abb87d3ba"),
        ("layers.3.hc_ffn_fn", "38466880cc29551d4418e0e1ac79b8aff37d49dd59d6a9b117e213137fcd8898"),
        ("layers.1.attn.compressor.wgate.weight", "8b7c3d754d2c1cacc66e8c2710705c2d5b4ac4ecfc240ba80a8ce2a9d6c56327"),
    ],
)
def test_released_dimensions_match_the_published_bytes(name: str, digest: str) -> None:
    assert hashlib.sha256(stored_bytes(synthesize_tensor(FLASH6, 51, name))).hexdigest() == digest


def test_any_tensor_alone_equals_its_bytes_in_the_file(tiny_checkpoint: Path) -> None:
    count = 0
    for path in sorted(tiny_checkpoint.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            alone = synthesize_tensor(TINY, 4105, name)
            assert (alone.dtype, alone.shape) == (tensor.dtype, tensor.shape), name
            assert stored_bytes(alone) == stored_bytes(tensor), name
            count += 1
    assert count == len(expected_tensors(TINY))


@st.composite
def small_configs(draw: st.DrawFn) -> ModelConfig:
    """Structures and sizes that no preset has."""
    groups = draw(st.sampled_from([1, 2, 3]))
    sizes = st.sampled_from([32, 64, 96])
    return ModelConfig.model_validate(
        {field: getattr(TINY, field) for field in ModelConfig.model_fields}
        | {
            "vocab_size": draw(st.integers(3, 40)),
            "hidden_size": draw(sizes),
            "moe_intermediate_size": draw(sizes),
            "num_hidden_layers": 5,
            "compress_ratios": (0, 2, 2, 1, 1),
            "kv_source_layer_ids": (1, 3),
            "index_source_layer_ids": draw(st.sampled_from([(1, 3), (1, 3, 4)])),
            "candidate_source_layer_id": 3,
            "num_attention_heads": groups * draw(st.integers(1, 2)),
            "o_groups": groups,
            "head_dim": draw(sizes),
            "q_lora_rank": draw(sizes),
            "o_lora_rank": draw(sizes),
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "index_head_dim": draw(sizes),
            "index_n_heads": draw(st.integers(1, 3)),
            "hc_mult": draw(st.integers(1, 4)),
        }
    )


@settings(max_examples=6, deadline=None)
@given(config=small_configs(), seed=st.integers(0, 2**64 - 1))
def test_any_config_and_seed_give_the_transcribed_bytes(
    config: ModelConfig, seed: int, reference_recipe: ModuleType
) -> None:
    made = 0
    for _, make in reference_recipe.recipes(config, seed):
        for name, tensor in make().items():
            ours = synthesize_tensor(config, seed, name)
            assert (ours.dtype, ours.shape) == (tensor.dtype, tensor.shape), name
            assert stored_bytes(ours) == stored_bytes(tensor), name
            made += 1
    assert made == len(expected_tensors(config))


def test_seed_and_name_both_matter() -> None:
    name = "layers.0.ffn.gate.weight"
    assert not torch.equal(synthesize_tensor(TINY, 1, name), synthesize_tensor(TINY, 2, name))
    assert not torch.equal(synthesize_tensor(TINY, 1, name), synthesize_tensor(TINY, 1, name.replace("0", "1")))


@pytest.mark.parametrize("shards", [2, 3, 40])
def test_shard_count_changes_files_not_tensors(tmp_path: Path, tiny_checkpoint: Path, shards: int) -> None:
    report = synthesize_checkpoint(TINY, 4105, tmp_path / "out", shards=shards)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(report.files)
    merged = {k: v for file in report.files for k, v in load_file(tmp_path / "out" / file).items()}
    for path in tiny_checkpoint.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            assert stored_bytes(merged.pop(name)) == stored_bytes(tensor), name
    assert not merged


def test_progress_adds_up_to_the_payload(tmp_path: Path) -> None:
    seen: list[int] = []
    report = synthesize_checkpoint(TINY, 4105, tmp_path / "out", progress=seen.append)
    assert sum(seen) == report.nbytes == 8_670_256


@pytest.mark.parametrize("name", ["layers.1.engram.embed.weight", "mtp.0.attn_norm.weight", "image_start"])
def test_tensors_outside_text_inference_have_no_recipe(name: str) -> None:
    with pytest.raises(SynthesisError, match=name):
        synthesize_tensor(FLASH, 1, name)


def test_an_unknown_tensor_is_named() -> None:
    with pytest.raises(UnknownTensorError, match=r"layers\.10\."):
        synthesize_tensor(TINY, 1, "layers.10.attn_norm.weight")


def test_a_directory_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "keep").write_text("mine")
    with pytest.raises(SynthesisError, match=r": expected an empty or new directory, found \['keep'\]"):
        synthesize_checkpoint(TINY, 4105, tmp_path)
    with pytest.raises(SynthesisError, match="keep: expected an empty or new directory, found a file"):
        synthesize_checkpoint(TINY, 4105, tmp_path / "keep")
    assert [path.name for path in tmp_path.iterdir()] == ["keep"]


@pytest.mark.parametrize(("seed", "shards"), [(-1, 6), (2**64, 6), (1, 1), (1, 0), (1, 100_000)])
def test_impossible_arguments_write_nothing(tmp_path: Path, seed: int, shards: int) -> None:
    with pytest.raises(SynthesisError, match=r"seed|shards"):
        synthesize_checkpoint(TINY, seed, tmp_path / "out", shards=shards)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=type)
def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    calls = iter(range(100))

    def fails_later(*args: object) -> int:
        if next(calls) == 50:
            raise error
        return 0

    monkeypatch.setattr(checkpoint_writer, "_write_band", fails_later)
    with pytest.raises(SynthesisError if isinstance(error, OSError) else KeyboardInterrupt) as caught:
        synthesize_checkpoint(TINY, 4105, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    if isinstance(caught.value, V41Error):
        assert caught.value.found == "No space left on device"


def test_a_disk_without_room_is_known_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total = sum(tensor.nbytes for tensor in checkpoint_writer.synthesized_tensors(TINY).values())
    free = total - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    monkeypatch.setattr(checkpoint_writer, "make_band", pytest.fail)
    with pytest.raises(SynthesisError, match=f"expected room for {total:,} bytes, found {free:,} bytes free"):
        synthesize_checkpoint(TINY, 4105, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_empty_directory_is_filled(tmp_path: Path, tiny_checkpoint: Path) -> None:
    (tmp_path / "out").mkdir()
    synthesize_checkpoint(TINY, 4105, tmp_path / "out")
    assert digests(tmp_path / "out") == digests(tiny_checkpoint)
