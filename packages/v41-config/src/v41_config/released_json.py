"""The released `config.json`: nested groups and their key order on one side, `ModelConfig` on the other."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from v41_config.errors import ConfigError
from v41_config.model_config import DraftingConfig, EngramConfig, ModelConfig

MODEL_TYPE = "deepseek_v41"
TEXT_MODEL_TYPE = "deepseek_v41_text"
ARCHITECTURE = "DeepseekV41ForCausalLM"

_TOP_LEVEL = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "transformers_version")
_APART = {*_TOP_LEVEL, "quantization", "engram", "drafting", "vision"}
_TEXT_FIELDS = tuple(f for f in ModelConfig.model_fields if f not in _APART)

_ENGRAM = {field: f"engram_{field}" for field in EngramConfig.model_fields}
_DRAFTING = {
    field: field if field == "num_nextn_predict_layers" else f"dspark_{field}" for field in DraftingConfig.model_fields
}

MAX_CONFIG_BYTES = 1 << 20
"""The released file has 4 kB."""


def _json_value(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return {name: _json_value(getattr(value, name)) for name in type(value).model_fields}
    return list(value) if isinstance(value, tuple) else value


def _group(value: BaseModel, names: dict[str, str]) -> dict[str, Any]:
    return {key: _json_value(getattr(value, field)) for field, key in names.items()}


def released_json(config: ModelConfig) -> dict[str, Any]:
    """The released nesting and key order; drafting layers append their zeros to `compress_ratios`."""
    text: dict[str, Any] = {"model_type": TEXT_MODEL_TYPE}
    text |= {field: _json_value(getattr(config, field)) for field in _TEXT_FIELDS}
    drafting_layers = config.drafting.num_nextn_predict_layers if config.drafting else 0
    text["compress_ratios"] += [0] * drafting_layers
    text |= {"engram_layer_ids": [], "engram_num_embeddings": []}
    if config.engram:
        text |= _group(config.engram, _ENGRAM)
    text |= _group(config.drafting, _DRAFTING) if config.drafting else {"num_nextn_predict_layers": 0}

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
    top |= {"quantization_config": _json_value(config.quantization), "text_config": text}
    if config.vision:
        top["vision_config"] = _json_value(config.vision)
    return top


def _load_object(path: Path) -> dict[str, Any]:
    if path.exists() and not path.is_file():
        raise ConfigError(str(path), "a directory or device", "a regular file")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
        if len(content) > MAX_CONFIG_BYTES:
            raise ConfigError(str(path), "more", f"a config of at most {MAX_CONFIG_BYTES} bytes")
        data = json.loads(content.decode("utf-8"), object_pairs_hook=_unique_keys)
    except OSError as error:
        raise ConfigError(str(path), error.strerror, "a readable config.json") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(path), str(error), "a JSON file") from error
    if not isinstance(data, dict):
        raise ConfigError(str(path), type(data).__name__, "a JSON object")
    return data


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ConfigError(next(key for key in keys if keys.count(key) > 1), "two values", "one value for a key")
    return values


def read_released_json(path: Path) -> ModelConfig:
    """See `ModelConfig.from_json`. Keys nobody knows are named in a warning, never dropped in silence."""
    data = _load_object(path / "config.json" if path.is_dir() else path)
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

    fields: dict[str, Any] = {key: text.pop(key) for key in _TEXT_FIELDS if key in text}
    fields |= {key: data.pop(key) for key in _TOP_LEVEL if key in data}
    fields["quantization"] = data.pop("quantization_config", {})
    fields["vision"] = data.pop("vision_config", None)
    fields["engram"] = _pop_group(text, _ENGRAM, "engram_layer_ids")
    fields["drafting"] = _pop_group(text, _DRAFTING, "num_nextn_predict_layers")
    _split_drafting_ratios(fields)
    if unknown := sorted([*data, *(f"text_config.{key}" for key in text)]):
        warnings.warn(f"config keys that v41 does not know, ignored: {', '.join(unknown)}", stacklevel=3)
    return ModelConfig.model_validate(fields)


def _pop_group(text: dict[str, Any], names: dict[str, str], switch: str) -> dict[str, Any] | None:
    """The fields of a group, or None where `switch` is absent, 0 or []: then only what says so again is taken out."""
    present = bool(text.get(switch))
    values = {field: text.pop(key) for field, key in names.items() if key in text and (present or not text[key])}
    return values if present else None


def _split_drafting_ratios(fields: dict[str, Any]) -> None:
    """Drop the entries of `compress_ratios` that belong to drafting layers: as many zeros as there are of those.

    The counts come from the file: nothing is allocated by them.
    """
    ratios, layers = fields.get("compress_ratios"), fields.get("num_hidden_layers")
    extra = fields["drafting"]["num_nextn_predict_layers"] if fields["drafting"] else 0
    if not isinstance(ratios, list) or not isinstance(layers, int) or not isinstance(extra, int):
        return  # validation names the field
    if len(ratios) - layers != extra or any(ratios[layers:]):
        raise ConfigError("compress_ratios", ratios, f"{layers} backbone entries and {extra} zeros for drafting layers")
    fields["compress_ratios"] = ratios[:layers]
