"""`inference/config.json`: its names are read and written back, what it cannot say is said here."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from v41_config import FLASH, FLASH6, PRESETS, TINY, ConfigError, ModelConfig

# The release's text settings under their names in inference/config.json, section 1 of model.md, typed in by hand.
FLASH_INFERENCE: dict[str, Any] = {
    "vocab_size": 129280,
    "dim": 5120,
    "moe_inter_dim": 2304,
    "n_layers": 40,
    "n_heads": 64,
    "head_dim": 512,
    "rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "swiglu_limit": 10.0,
    "norm_eps": 1e-20,
    "rope_theta": 10000,
    "rope_factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_seq_len": 65536,
    "compress_rope_theta": 160000,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "n_activated_experts": 6,
    "score_func": "sqrtsoftplus",
    "route_scale": 1.5,
    "window_size": 128,
    "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
    "kv_source_layers": [2, 8, 14, 20],
    "index_source_layers": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_source_layer": 20,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 16000000,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_pad_id": 2,
    "engram_compressed_vocab_size": 99092,
    "n_mtp_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [37, 38, 39],
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
    "dspark_n_activated_experts": 3,
    "dtype": "fp8",
    "expert_dtype": "fp4",
}
TEXT_OF_FLASH = FLASH.model_copy(update={"vision": None, "image_token_id": None})


def read(directory: Path, content: dict[str, Any]) -> ModelConfig:
    path = directory / "config.json"
    path.write_text(json.dumps(content))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return ModelConfig.from_json(path)


def changed(**values: Any) -> dict[str, Any]:
    return {**FLASH_INFERENCE, **values}


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in FLASH_INFERENCE.items() if name != key}


def test_the_release_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, FLASH_INFERENCE) == TEXT_OF_FLASH


def test_the_release_is_written() -> None:
    assert FLASH.to_inference_json() == FLASH_INFERENCE


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "flash"])
def test_round_trip(name: str, tmp_path: Path) -> None:
    assert read(tmp_path, PRESETS[name].to_inference_json()) == PRESETS[name]


def test_the_context_is_what_yarn_reaches_unless_the_file_sets_it(tmp_path: Path) -> None:
    assert "max_seq_len" not in FLASH6.to_inference_json()
    assert TINY.to_inference_json()["max_seq_len"] == 4096  # not 16 * 64
    assert read(tmp_path, changed(rope_factor=4)).max_position_embeddings == 4 * 65536
    assert read(tmp_path, changed(rope_factor=2.5)).max_position_embeddings == 163840
    assert read(tmp_path, changed(max_seq_len=8192)).max_position_embeddings == 8192


@pytest.mark.parametrize("settings", [{"gate_temp": 1.0}, {"gate_temp": 1}, {"norm_topk_prob": True}])
def test_settings_that_have_one_value_may_be_there(settings: dict[str, Any], tmp_path: Path) -> None:
    assert read(tmp_path, changed(**settings)) == TEXT_OF_FLASH


REFUSED: list[tuple[dict[str, Any], str]] = [
    (changed(gate_temp=0.5), "gate_temp"),
    (changed(norm_topk_prob=False), "norm_topk_prob"),
    (changed(dtype="bf16"), "dtype"),
    (without("dtype"), "dtype"),
    (changed(expert_dtype="fp8"), "quantization.expert_dtype"),
    (without("expert_dtype"), "expert_dtype"),
    (changed(score_func="sigmoid"), "scoring_func"),
    (changed(n_layers=41), "compress_ratios"),
    (changed(n_mtp_layers=0), "compress_ratios"),
    (changed(kv_source_layers=[2, 8, 14]), "candidate_source_layer_id"),
    (changed(candidate_topk_blocks=8), "candidate_topk_blocks"),
    (without("rope_factor"), "max_seq_len"),
    ({**without("beta_fast"), "max_seq_len": 8192}, "rope_scaling.beta_fast"),
    (changed(rope_factor=1.00001), "max_seq_len"),
    (changed(max_seq_len=None), "max_seq_len"),
    (changed(max_seq_len=-1), "max_position_embeddings"),
    (changed(dim="5120"), "hidden_size"),
    (without("head_dim"), "head_dim"),
    (without("engram_pad_id"), "engram.pad_token_id"),
    ({"dim": 5120, "model_type": "deepseek_v4"}, "model_type"),
]


@pytest.mark.parametrize(("content", "field"), REFUSED)
def test_a_wrong_file_is_refused_by_field(content: dict[str, Any], field: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, content)
    assert caught.value.where == field


def test_unknown_keys_and_vision_are_named_in_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(changed(vision_dim=1024, n_hash_layers=3)))
    with pytest.warns(UserWarning, match=r"ignored: n_hash_layers, vision_dim$") as caught:
        assert ModelConfig.from_json(path) == TEXT_OF_FLASH
    assert caught[0].filename == str(path)


@pytest.mark.parametrize("mix", [lambda c: c.update(text_config={}), lambda c: c.update(model_type="deepseek_v41")])
def test_a_mixture_of_both_formats_is_read_as_the_released_one(
    mix: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    content = changed()
    mix(content)
    with pytest.raises(ConfigError, match=r"model_type|text_config|dtype"):
        read(tmp_path, content)
