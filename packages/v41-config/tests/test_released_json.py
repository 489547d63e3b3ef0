"""The released `config.json`: read exactly, written back byte for byte, hostile files refused."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from v41_config import FLASH, FLASH6, TINY, ConfigError, ModelConfig
from v41_config.config_file import MAX_CONFIG_BYTES

DATA = Path(__file__).parent / "data"

# What the release says, section 1 of model.md, typed in by hand.
RELEASED_TEXT_CONFIG = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 129280,
    "hidden_size": 5120,
    "moe_intermediate_size": 2304,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "compress_rope_theta": 160000,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 128,
    "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_source_layer_id": 20,
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
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99092,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [37, 38, 39],
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
    "dspark_num_experts_per_tok": 3,
}

RELEASED_CONFIG = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "transformers_version": "5.6.0",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 129264,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
    "text_config": RELEASED_TEXT_CONFIG,
    "vision_config": {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": 32,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "patch_size": 14,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 295936,
        "max_wh_ratio": None,
    },
}


def write(directory: Path, content: dict[str, Any] | str | bytes) -> Path:
    path = directory / "config.json"
    text = json.dumps(content) if isinstance(content, dict) else content
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def released(name: str) -> dict[str, Any]:
    if name == "flash":
        content: dict[str, Any] = json.loads(json.dumps(RELEASED_CONFIG))
    else:
        content = json.loads((DATA / f"{name}_config.json").read_text())
    return content


def read_without_warning(path: Path) -> ModelConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return ModelConfig.from_json(path)


@pytest.mark.parametrize(("name", "preset"), [("tiny", TINY), ("flash6", FLASH6)])
def test_presets_equal_the_files_byte_for_byte(name: str, preset: ModelConfig) -> None:
    path = DATA / f"{name}_config.json"
    assert read_without_warning(path) == preset
    assert json.dumps(preset.to_released_json(), indent=2).encode() == path.read_bytes()


def test_flash_equals_the_released_numbers(tmp_path: Path) -> None:
    assert FLASH.to_released_json() == RELEASED_CONFIG
    assert read_without_warning(write(tmp_path, RELEASED_CONFIG)) == FLASH


def test_flash_round_trip_keeps_the_drafting_entries_and_the_bytes(tmp_path: Path) -> None:
    text = json.dumps(FLASH.to_released_json(), indent=2)
    ratios = json.loads(text)["text_config"]["compress_ratios"]
    assert len(ratios) == 43
    assert ratios[40:] == [0, 0, 0]
    config = read_without_warning(write(tmp_path, text))
    assert config.compress_ratios == tuple(ratios[:40])
    assert json.dumps(config.to_released_json(), indent=2) == text


def test_a_directory_is_read_as_its_config_file(tmp_path: Path) -> None:
    write(tmp_path, released("tiny"))
    assert ModelConfig.from_json(tmp_path) == TINY
    assert ModelConfig.from_json(str(tmp_path)) == TINY


@pytest.mark.parametrize(
    "model_type",
    ["deepseek_v4", "deepseek_v41x", "deepseek_v41_text", "deepseek_v3", "DEEPSEEK_V41", "deepseek_v41 ", "", None, 41],
)
def test_model_type_is_matched_exactly(tmp_path: Path, model_type: object) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_json(write(tmp_path, {**released("tiny"), "model_type": model_type}))
    assert (caught.value.where, caught.value.found) == ("model_type", model_type)
    assert caught.value.expected == "'deepseek_v41'"


def test_model_type_must_be_there(tmp_path: Path) -> None:
    content = released("tiny")
    del content["model_type"]
    with pytest.raises(ConfigError, match=r"^model_type: expected 'deepseek_v41', found None"):
        ModelConfig.from_json(write(tmp_path, content))


def broken(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """FLASH's file after `change`."""
    content = released("flash")
    change(content)
    return content


def in_text(**values: Any) -> dict[str, Any]:
    """FLASH's file with other values in its `text_config`."""
    return broken(lambda content: content["text_config"].update(values))


REFUSED: list[tuple[dict[str, Any], str]] = [
    (broken(lambda c: c.update(architectures=["DeepseekV4ForCausalLM"])), "architectures"),
    (broken(lambda c: c.update(dtype="float16")), "dtype"),
    (broken(lambda c: c.pop("text_config")), "text_config"),
    (broken(lambda c: c.update(text_config=[])), "text_config"),
    (in_text(model_type="deepseek_v41"), "text_config.model_type"),
    (in_text(hidden_size="5120"), "hidden_size"),
    (in_text(rms_norm_eps=float("nan")), "rms_norm_eps"),
    (in_text(rope_theta=float("inf")), "rope_theta"),
    (in_text(compress_ratios=[0] * 2 + [2] * 18 + [1] * 20), "compress_ratios"),
    (in_text(compress_ratios=[0] * 2 + [2] * 18 + [1] * 20 + [0] * 4), "compress_ratios"),
    (in_text(compress_ratios=[0] * 2 + [2] * 18 + [1] * 20 + [0, 0, 1]), "compress_ratios"),
    (in_text(compress_ratios=40), "compress_ratios"),
    (in_text(num_nextn_predict_layers=10**15), "compress_ratios"),
    (in_text(num_nextn_predict_layers=0), "compress_ratios"),
    (in_text(num_hidden_layers=10**15), "compress_ratios"),
    (in_text(num_hidden_layers="40"), "num_hidden_layers"),
    (in_text(engram_layer_ids=[1]), "engram_num_embeddings"),
    (in_text(engram_head_dim=None), "engram.head_dim"),
    (in_text(dspark_markov_rank=0), "drafting.markov_rank"),
    (broken(lambda c: c["text_config"].pop("dspark_block_size")), "drafting.block_size"),
    (broken(lambda c: c["text_config"].pop("hc_eps")), "hc_eps"),
    (broken(lambda c: c["vision_config"].update(patch_size=True)), "vision.patch_size"),
    (broken(lambda c: c["quantization_config"].update(fmt="e4m3")), "quantization.fmt"),
    (broken(lambda c: c.update(quantization_config=None)), "quantization"),
    (broken(lambda c: c.pop("quantization_config")), "quantization_config"),
    (broken(lambda c: c.update(bos_token_id=129280)), "bos_token_id"),
]


@pytest.mark.parametrize(("content", "field"), REFUSED)
def test_a_wrong_value_in_the_file_is_named(tmp_path: Path, content: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_json(write(tmp_path, content))
    assert caught.value.where == field


def test_unknown_keys_are_named_in_a_warning(tmp_path: Path) -> None:
    content = {**released("tiny"), "torch_dtype": "bfloat16"}
    content["text_config"] = {**content["text_config"], "n_group": 8}
    with pytest.warns(UserWarning, match="ignored: text_config.n_group, torch_dtype$") as caught:
        config = ModelConfig.from_json(write(tmp_path, content))
    assert config == TINY
    assert caught[0].filename == str(tmp_path / "config.json")  # the file is at fault, no line of code
    (shown,) = warnings.formatwarning(caught[0].message, UserWarning, caught[0].filename, caught[0].lineno).splitlines()
    assert shown.endswith("text_config.n_group, torch_dtype")
    with pytest.warns(UserWarning, match=r"ignored: 'a\\nb'$"):
        ModelConfig.from_json(write(tmp_path, {**released("tiny"), "a\nb": 1}))


def test_settings_of_a_group_that_is_switched_off_are_named_too(tmp_path: Path) -> None:
    content = in_text(engram_layer_ids=[], num_nextn_predict_layers=0, compress_ratios=list(FLASH.compress_ratios))
    with pytest.warns(UserWarning, match="text_config.dspark_block_size.*text_config.engram_head_dim"):
        config = ModelConfig.from_json(write(tmp_path, content))
    assert config.engram is None
    assert config.drafting is None


TEXT = json.dumps(released("tiny"))

HOSTILE: list[tuple[str | bytes, str]] = [
    (" " * MAX_CONFIG_BYTES + TEXT, f"at most {MAX_CONFIG_BYTES} bytes"),
    ("", "a JSON file"),
    ("{", "a JSON file"),
    (TEXT + "}", "a JSON file"),
    (b"\xff\xfe\x00", "a JSON file"),
    (TEXT.encode("utf-16"), "a JSON file"),
    ("[" * 500_000, "a JSON file"),
    ('{"a":' * 100_000 + "1" + "}" * 100_000, "a JSON file"),
    (TEXT.replace('"vocab_size": 512', '"vocab_size": ' + "9" * 5000), ""),
    ("[]", "a JSON object"),
    ("null", "a JSON object"),
    ('"config"', "a JSON object"),
    (TEXT.replace('"head_dim": 64', '"head_dim": 32, "head_dim": 64', 1), "one value for a key"),
    ('{"model_type": "deepseek_v41", ' + TEXT[1:], "one value for a key"),
]


@pytest.mark.parametrize(("content", "expected"), HOSTILE, ids=[str(content[:12]) for content, _ in HOSTILE])
def test_hostile_files_get_one_typed_error(tmp_path: Path, content: str | bytes, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_json(write(tmp_path, content))
    assert expected in caught.value.expected


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "config.json", tmp_path / "no" / "such"):
        with pytest.raises(ConfigError, match="No such file") as caught:
            ModelConfig.from_json(path)
        assert caught.value.where.startswith(str(path))


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")  # opening it for reading would wait for ever
    with pytest.raises(ConfigError, match="a regular file"):
        ModelConfig.from_json(tmp_path)
    with pytest.raises(ConfigError, match="a regular file"):
        ModelConfig.from_json("/dev/zero")
