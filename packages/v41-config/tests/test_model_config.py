"""`ModelConfig` as a value: strict fields, one typed error for each broken rule, the presets' numbers."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from pydantic import ValidationError

from v41_config import FLASH, FLASH6, PRESETS, TINY, ConfigError, EngramConfig, ModelConfig, RopeScaling, V41Error


def changed(config: ModelConfig, **changes: Any) -> ModelConfig:
    """`config` with other values, validated."""
    return ModelConfig.model_validate({**{name: getattr(config, name) for name in ModelConfig.model_fields}, **changes})


def rope_scaling(**changes: Any) -> dict[str, Any]:
    return {"factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64, **changes}


def test_presets_are_what_validation_would_make_of_their_fields() -> None:
    for preset in PRESETS.values():
        assert changed(preset) == preset
        assert hash(changed(preset)) == hash(preset)


def test_flash_derived_widths() -> None:
    assert FLASH.hc_dim == 20480
    assert FLASH.hc_mixes == 24
    assert len(FLASH.layers) == 40


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        TINY.vocab_size = 3  # type: ignore[misc]


# Every rule that joins fields, broken once: (change to TINY, field the error must name, text of the rule).
INCONSISTENT: list[tuple[dict[str, Any], str, str]] = [
    ({"compress_ratios": TINY.compress_ratios[:-1]}, "compress_ratios", "one entry for each of 10 layers"),
    ({"num_hidden_layers": 11}, "compress_ratios", "one entry for each of 11 layers"),
    ({"compress_ratios": (0, 0, 4, 2, 2, 2, 1, 1, 1, 1)}, "compress_ratios", "entries 0, 1 or 2"),
    ({"kv_source_layer_ids": (2, 4, 6, 10)}, "kv_source_layer_ids", "layer ids from 0 to 9"),
    ({"kv_source_layer_ids": (-1, 2, 4, 6)}, "kv_source_layer_ids", "layer ids from 0 to 9"),
    ({"kv_source_layer_ids": (4, 2, 6)}, "kv_source_layer_ids", "ascending"),
    ({"index_source_layer_ids": (2, 4, 6, 80)}, "index_source_layer_ids", "layer ids from 0 to 9"),
    ({"index_source_layer_ids": (2, 4, 6, 6)}, "index_source_layer_ids", "without repetition"),
    ({"index_source_layer_ids": (2, 6, 8)}, "kv_source_layer_ids", "a subset of index_source_layer_ids"),
    ({"candidate_source_layer_id": 8}, "candidate_source_layer_id", "the one KV source of ratio 1"),
    ({"kv_source_layer_ids": (2, 4, 6, 8)}, "candidate_source_layer_id", "the one KV source of ratio 1"),
    ({"kv_source_layer_ids": (2, 4), "index_source_layer_ids": (2, 4)}, "candidate_source_layer_id", "the one KV"),
    ({"kv_source_layer_ids": (1, 2, 4, 6), "index_source_layer_ids": (1, 2, 4, 6)}, "compress_ratios[1]", "0 outside"),
    ({"index_source_layer_ids": (2, 3, 4, 6)}, "compress_ratios[3]", "2 where a KV source is an index source"),
    ({"compress_ratios": (0, 2, 2, 2, 2, 2, 1, 1, 1, 1)}, "compress_ratios[1]", "a KV source of the same ratio"),
    ({"compress_ratios": (0, 0, 2, 2, 2, 1, 1, 1, 1, 1)}, "compress_ratios[5]", "a KV source of the same ratio"),
    ({"compress_ratios": (0, 0, 2, 2, 2, 2, 1, 1, 1, 2)}, "compress_ratios[9]", "a KV source of the same ratio"),
    ({"candidate_topk_blocks": 2}, "candidate_topk_blocks", "index_topk = 16 visible entries (these hold 9)"),
    ({"index_topk": 26}, "candidate_topk_blocks", "index_topk = 26 visible entries (these hold 25)"),
    ({"o_groups": 3}, "o_groups", "a divisor of 8 heads"),
    ({"hidden_size": 264}, "hidden_size", "a multiple of 32"),
    ({"moe_intermediate_size": 48}, "moe_intermediate_size", "a multiple of 32"),
    ({"head_dim": 80}, "head_dim", "a multiple of 32"),
    ({"q_lora_rank": 8}, "q_lora_rank", "a multiple of 32"),
    ({"o_lora_rank": 33}, "o_lora_rank", "a multiple of 32"),
    ({"index_head_dim": 40}, "index_head_dim", "a multiple of 32"),
    ({"qk_rope_head_dim": 31}, "qk_rope_head_dim", "even"),
    ({"qk_rope_head_dim": 66}, "qk_rope_head_dim", "at most head_dim and index_head_dim"),
    ({"index_head_dim": 32, "qk_rope_head_dim": 34}, "qk_rope_head_dim", "at most head_dim and index_head_dim"),
    ({"num_experts_per_tok": 17}, "num_experts_per_tok", "at most n_routed_experts"),
    ({"sliding_window": 4097}, "sliding_window", "at most max_position_embeddings"),
    ({"rope_theta": 1}, "rope_theta", "above 1"),
    ({"compress_rope_theta": 0.5}, "compress_rope_theta", "above 1"),
    ({"bos_token_id": 512}, "bos_token_id", "below vocab_size = 512"),
    ({"eos_token_id": -1}, "eos_token_id", "below vocab_size = 512"),
    ({"pad_token_id": 100000}, "pad_token_id", "below vocab_size = 512"),
    (
        {
            "engram": EngramConfig(
                layer_ids=(1,),
                num_embeddings=(5, 6),
                max_ngram_size=4,
                vocab_size=9,
                n_heads=2,
                head_dim=8,
                pad_token_id=2,
                compressed_vocab_size=7,
            )
        },
        "engram_num_embeddings",
        "one entry per engram layer",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "field", "rule"), INCONSISTENT)
def test_each_consistency_rule_names_its_field(changes: dict[str, Any], field: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        changed(TINY, **changes)
    assert caught.value.where == field
    assert rule in caught.value.expected
    assert field in str(caught.value)


def test_the_smallest_candidate_blocks_that_always_hold_the_top_k_are_accepted() -> None:
    # 3 blocks of 8, the newest perhaps with one visible entry only: 2 * 8 + 1 = 17
    assert changed(TINY, candidate_topk_blocks=3, index_topk=17).index_topk == 17
    with pytest.raises(ConfigError, match="candidate_topk_blocks"):
        changed(TINY, candidate_topk_blocks=3, index_topk=18)


# Values of the wrong kind: (field, value, text of the rule).
WRONG_KIND: list[tuple[str, Any, str]] = [
    ("vocab_size", True, "valid integer"),
    ("vocab_size", "512", "valid integer"),
    ("vocab_size", 512.0, "valid integer"),
    ("vocab_size", None, "valid integer"),
    ("hidden_size", 0, "greater than 0"),
    ("index_topk", -16, "greater than 0"),
    ("max_position_embeddings", 2**31, "less than or equal to 16777216"),
    ("vocab_size", 10**400, "less than or equal to 16777216"),
    ("rms_norm_eps", "1e-20", "finite number"),
    ("rms_norm_eps", 0.0, "above 0"),
    ("rms_norm_eps", float("nan"), "finite number"),
    ("swiglu_limit", float("inf"), "finite number"),
    ("swiglu_limit", 10**400, "finite number"),
    ("swiglu_limit", -10.0, "above 0"),
    ("hc_eps", True, "finite number"),
    ("routed_scaling_factor", float("-inf"), "finite number"),
    ("routed_scaling_factor", 0, "above 0"),
    ("initializer_range", float("nan"), "finite number"),
    ("rope_scaling.factor", rope_scaling(factor=float("nan")), "finite number"),
    ("rope_scaling.beta_slow", rope_scaling(beta_slow=0), "above 0"),
    ("rope_scaling.rope_type", rope_scaling(rope_type="linear"), "'yarn'"),
    ("rope_scaling.mscale", rope_scaling(mscale=1.0), "no such field"),
    ("rope_scaling", "yarn", "dictionary"),
    ("compress_ratios", {0, 1, 2}, "tuple"),
    ("compress_ratios", "0022221111", "tuple"),
    ("compress_ratios.1", (0, False, 2, 2, 2, 2, 1, 1, 1, 1), "valid integer"),
    ("compress_ratios.2", [0, 0, 2.0, 2, 2, 2, 1, 1, 1, 1], "valid integer"),
    ("kv_source_layer_ids.0", ["2", 4, 6], "valid integer"),
    ("use_cache", 1, "boolean"),
    ("num_key_value_heads", 8, "1"),
    ("n_shared_experts", 2, "1"),
    ("attention_bias", True, "False"),
    ("tie_word_embeddings", True, "False"),
    ("norm_topk_prob", False, "True"),
    ("hidden_act", "gelu", "'silu'"),
    ("scoring_func", "sigmoid", "'sqrtsoftplus'"),
    ("topk_method", "greedy", "'noaux_tc'"),
    ("quantization.weight_block_size", {"weight_block_size": [128, 128]}, "[32, 32]"),
    ("quantization.quant_method", {"quant_method": "awq"}, "'fp8'"),
    ("quantization.expert_dtype", {"expert_dtype": "fp8"}, "'fp4'"),
]


@pytest.mark.parametrize(("where", "value", "rule"), WRONG_KIND)
def test_each_field_refuses_values_of_another_kind(where: str, value: Any, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        changed(TINY, **{where.partition(".")[0]: value})
    assert caught.value.where == where
    assert rule in caught.value.expected


def test_a_missing_field_is_named() -> None:
    fields = {name: getattr(TINY, name) for name in ModelConfig.model_fields if name != "hc_mult"}
    with pytest.raises(ConfigError, match=r"^hc_mult: expected a value, found None$"):
        ModelConfig.model_validate(fields)


def test_an_unknown_field_is_refused_by_the_constructor() -> None:
    with pytest.raises(ConfigError, match=r"^n_group: expected no such field, found 8$"):
        changed(TINY, n_group=8)


@pytest.mark.parametrize("data", [None, 3, "config.json", []])
def test_what_is_no_mapping_is_refused(data: object) -> None:
    with pytest.raises(ConfigError, match=r"^config: "):
        ModelConfig.model_validate(data)


def test_a_list_becomes_a_tuple_and_numbers_keep_their_type() -> None:
    config = changed(TINY, compress_ratios=list(TINY.compress_ratios), swiglu_limit=10)
    assert config.compress_ratios == TINY.compress_ratios
    assert isinstance(config.compress_ratios, tuple)
    assert isinstance(config.swiglu_limit, int)  # so that the file is written back as it was read
    assert isinstance(TINY.swiglu_limit, float)


def test_rope_scaling_alone_raises_the_plain_validation_error() -> None:
    with pytest.raises(ValidationError):
        RopeScaling.model_validate(rope_scaling(original_max_position_embeddings=0))


def test_errors_survive_pickling() -> None:
    with pytest.raises(V41Error) as caught:
        changed(TINY, o_groups=3)
    copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301  our own bytes; processes send errors this way
    assert type(copy) is ConfigError
    assert (copy.where, copy.found, copy.expected) == ("o_groups", 3, "a divisor of 8 heads")
    assert str(copy) == str(caught.value)


def test_flash6_has_one_layer_of_each_mode() -> None:
    assert len({layer.mode for layer in FLASH6.layers}) == 6
