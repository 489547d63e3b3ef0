"""The JSON schema of a released `config.json`, derived from the fields of `ModelConfig`."""

from __future__ import annotations

from typing import Any

from v41_config.model_config import ModelConfig
from v41_config.released_json import ARCHITECTURE, DRAFTING_KEYS, ENGRAM_KEYS, MODEL_TYPE, TEXT_FIELDS, TEXT_MODEL_TYPE
from v41_config.released_json import TOP_LEVEL as TOP_LEVEL_FIELDS

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def config_schema() -> dict[str, Any]:
    """Draft 2020-12. Rules that join fields are not in it: `ModelConfig.from_json` checks those.

    Unknown keys are allowed, as `from_json` reports and ignores them.
    """
    flat = ModelConfig.model_json_schema()
    groups, fields = flat["$defs"], flat["properties"]
    text: dict[str, Any] = {"model_type": {"const": TEXT_MODEL_TYPE}}
    text |= {name: fields[name] for name in TEXT_FIELDS}
    text |= _renamed(groups["EngramConfig"], ENGRAM_KEYS) | _renamed(groups["DraftingConfig"], DRAFTING_KEYS)
    text["engram_layer_ids"] = {"type": "array", "items": {"type": "integer"}}
    text["num_nextn_predict_layers"] = {"type": "integer", "minimum": 0}
    top: dict[str, Any] = {
        "architectures": {"const": [ARCHITECTURE]},
        "model_type": {"const": MODEL_TYPE},
        "dtype": {"const": "bfloat16"},
        **{name: fields[name] for name in TOP_LEVEL_FIELDS},
        "quantization_config": {"$ref": "#/$defs/QuantizationConfig"},
        "text_config": {
            "type": "object",
            "properties": text,
            "required": [name for name in TEXT_FIELDS if name in flat["required"]],
        },
        "vision_config": {"$ref": "#/$defs/VisionConfig"},
    }
    return {
        "$schema": _DIALECT,
        "title": "DeepSeek-V4.1 config.json",
        "type": "object",
        "properties": top,
        "required": ["model_type", "quantization_config", "text_config"],
        "$defs": {name: groups[name] for name in ("QuantizationConfig", "RopeScaling", "VisionConfig")},
    }


def _renamed(group: dict[str, Any], keys: dict[str, str]) -> dict[str, Any]:
    return {key: group["properties"][field] for field, key in keys.items()}
