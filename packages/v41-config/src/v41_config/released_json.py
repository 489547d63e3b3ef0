"""The released `config.json`: nested groups and their key order on one side, `ModelConfig` on the other."""

from __future__ import annotations

from typing import Any

from v41_config.errors import ConfigError
from v41_config.json_groups import group_json, join_drafting_ratios, json_value, pop_group, split_drafting_ratios
from v41_config.model_config import DraftingConfig, EngramConfig, ModelConfig

MODEL_TYPE = "deepseek_v41"
TEXT_MODEL_TYPE = "deepseek_v41_text"
ARCHITECTURE = "DeepseekV41ForCausalLM"

_APART = {"quantization", "engram", "drafting", "vision"}
TOP_LEVEL = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "transformers_version")
"""Fields of `ModelConfig` that stand beside `text_config`."""

TEXT_FIELDS = tuple(f for f in ModelConfig.model_fields if f not in {*TOP_LEVEL, *_APART})
"""Fields of `ModelConfig` that stand in `text_config` under their own names."""

ENGRAM_KEYS = {field: f"engram_{field}" for field in EngramConfig.model_fields}
DRAFTING_KEYS = {
    field: field if field == "num_nextn_predict_layers" else f"dspark_{field}" for field in DraftingConfig.model_fields
}


def released_json(config: ModelConfig) -> dict[str, Any]:
    """The released nesting and key order."""
    text: dict[str, Any] = {"model_type": TEXT_MODEL_TYPE}
    text |= {field: json_value(getattr(config, field)) for field in TEXT_FIELDS}
    drafting_layers = config.drafting.num_nextn_predict_layers if config.drafting else 0
    text["compress_ratios"] = join_drafting_ratios(config.compress_ratios, drafting_layers)
    text |= {"engram_layer_ids": [], "engram_num_embeddings": []}
    if config.engram:
        text |= group_json(config.engram, ENGRAM_KEYS)
    text |= group_json(config.drafting, DRAFTING_KEYS) if config.drafting else {"num_nextn_predict_layers": 0}

    top: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "dtype": "bfloat16",
        "transformers_version": config.transformers_version,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    if config.image_token_id is not None:
        top["image_token_id"] = config.image_token_id
    top |= {"quantization_config": json_value(config.quantization), "text_config": text}
    if config.vision:
        top["vision_config"] = json_value(config.vision)
    return top


def released_fields(data: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fields of `ModelConfig` from a file's object, which is used up, and the keys that nobody knows.

    A file without `quantization_config` is refused: in this format that says the weights are not quantised, and such
    a checkpoint has other tensors than the release.
    """
    for key, expected, absent in (
        ("model_type", MODEL_TYPE, None),
        ("architectures", [ARCHITECTURE], [ARCHITECTURE]),
        ("dtype", "bfloat16", "bfloat16"),
    ):
        if (found := data.pop(key, absent)) != expected:
            raise ConfigError(key, found, repr(expected))
    text = data.pop("text_config", None)
    if not isinstance(text, dict):
        raise ConfigError("text_config", type(text).__name__, "an object")
    if (found := text.pop("model_type", TEXT_MODEL_TYPE)) != TEXT_MODEL_TYPE:
        raise ConfigError("text_config.model_type", found, repr(TEXT_MODEL_TYPE))
    if "quantization_config" not in data:
        raise ConfigError("quantization_config", None, "the formats of the release; without it, weights are plain")

    fields: dict[str, Any] = {key: text.pop(key) for key in TEXT_FIELDS if key in text}
    fields |= {key: data.pop(key) for key in TOP_LEVEL if key in data}
    fields["quantization"] = data.pop("quantization_config")
    fields["vision"] = data.pop("vision_config", None)
    fields["engram"] = pop_group(text, ENGRAM_KEYS, "engram_layer_ids")
    fields["drafting"] = pop_group(text, DRAFTING_KEYS, "num_nextn_predict_layers")
    split_drafting_ratios(fields)
    return fields, sorted([*data, *(f"text_config.{key}" for key in text)])
