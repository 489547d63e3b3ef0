"""The JSON schema of a config file: true of the files, false of broken ones, the same rules as the fields."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from v41_config import FLASH, FLASH6, PRESETS, TINY, ModelConfig
from v41_config.config_schema import config_schema

TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float),
    "null": type(None),
}  # fmt: skip
UNDERSTOOD = {
    "$ref", "anyOf", "const", "default", "description", "enum", "exclusiveMinimum", "items", "maximum", "minimum",
    "properties", "required", "title", "type", "additionalProperties",
}  # fmt: skip


def complaints(schema: dict[str, Any], value: Any, root: dict[str, Any], where: str = "file") -> list[str]:
    """What a value breaks: the keywords that this schema uses, no others."""
    schema = {key: item for key, item in schema.items() if key not in ("$schema", "$defs")}
    assert set(schema) <= UNDERSTOOD, schema
    if "$ref" in schema:
        return complaints(root["$defs"][schema["$ref"].rpartition("/")[2]], value, root, where)
    if "anyOf" in schema:
        return min((complaints(option, value, root, where) for option in schema["anyOf"]), key=len)
    found = []
    wanted = TYPES.get(schema.get("type", ""))
    if wanted and (not isinstance(value, wanted) or (isinstance(value, bool) and schema["type"] != "boolean")):
        return [f"{where}: type"]
    for keyword, broken in (
        ("const", lambda limit: value != limit),
        ("enum", lambda limit: value not in limit),
        ("minimum", lambda limit: value < limit),
        ("exclusiveMinimum", lambda limit: value <= limit),
        ("maximum", lambda limit: value > limit),
        ("required", lambda limit: not set(limit) <= set(value)),
    ):
        if keyword in schema and broken(schema[keyword]):
            found.append(f"{where}: {keyword}")
    if schema.get("additionalProperties") is False and not set(value) <= set(schema["properties"]):
        found.append(f"{where}: additionalProperties")
    for item in value if "items" in schema else []:
        found += complaints(schema["items"], item, root, f"{where}[]")
    for key, rule in schema.get("properties", {}).items():
        if key in value:
            found += complaints(rule, value[key], root, f"{where}.{key}")
    return found


def check(content: dict[str, Any]) -> list[str]:
    schema = config_schema()
    return complaints(schema, json.loads(json.dumps(content)), schema)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid(name: str) -> None:
    assert check(PRESETS[name].to_released_json()) == []


BROKEN: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda c: c.update(model_type="deepseek_v4"), "file.model_type: const"),
    (lambda c: c.pop("model_type"), "file: required"),
    (lambda c: c.pop("quantization_config"), "file: required"),
    (lambda c: c["quantization_config"].update(expert_dtype="fp8"), "file.quantization_config.expert_dtype: const"),
    (lambda c: c["quantization_config"].update(fmt="e4m3"), "file.quantization_config: additionalProperties"),
    (lambda c: c["text_config"].pop("hc_eps"), "file.text_config: required"),
    (lambda c: c["text_config"].update(hidden_size="5120"), "file.text_config.hidden_size: type"),
    (lambda c: c["text_config"].update(hidden_size=0), "file.text_config.hidden_size: exclusiveMinimum"),
    (lambda c: c["text_config"].update(vocab_size=2**31), "file.text_config.vocab_size: maximum"),
    (lambda c: c["text_config"].update(rms_norm_eps=0.0), "file.text_config.rms_norm_eps: minimum"),
    (lambda c: c["text_config"].update(compress_ratios=[0, "2"]), "file.text_config.compress_ratios[]: type"),
    (lambda c: c["text_config"].update(scoring_func="sigmoid"), "file.text_config.scoring_func: const"),
    (lambda c: c["text_config"].update(dspark_block_size=0), "file.text_config.dspark_block_size: exclusiveMinimum"),
    (lambda c: c["text_config"]["rope_scaling"].pop("factor"), "file.text_config.rope_scaling: required"),
    (lambda c: c["vision_config"].update(patch_size=None), "file.vision_config.patch_size: type"),
]


@pytest.mark.parametrize(("change", "complaint"), BROKEN)
def test_broken_files_are_not(change: Callable[[dict[str, Any]], object], complaint: str) -> None:
    content = FLASH.to_released_json()
    change(content)
    assert check(content) == [complaint]


def test_every_key_of_the_release_has_a_rule() -> None:
    schema, content = config_schema(), FLASH.to_released_json()
    assert set(content) == set(schema["properties"])
    text = schema["properties"]["text_config"]
    assert set(content["text_config"]) == set(text["properties"])
    fields = ModelConfig.model_fields
    assert set(text["required"]) == {name for name, field in fields.items() if field.is_required()}


def test_unknown_keys_are_allowed_as_they_are_when_a_file_is_read() -> None:
    content = TINY.to_released_json()
    content["torch_dtype"] = content["text_config"]["n_group"] = 8
    assert check(content) == []
    assert check(FLASH6.to_released_json()) == []
