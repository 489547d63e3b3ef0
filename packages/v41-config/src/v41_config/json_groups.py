"""What both formats of a config file share: groups of settings, and the ratios of drafting layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from v41_config.errors import ConfigError


def json_value(value: Any) -> Any:
    """A field's value as JSON has it."""
    if isinstance(value, BaseModel):
        return {name: json_value(getattr(value, name)) for name in type(value).model_fields}
    return list(value) if isinstance(value, tuple) else value


def group_json(value: BaseModel, keys: Mapping[str, str]) -> dict[str, Any]:
    """A group's fields under the file's keys, in the order of `keys`."""
    return {key: json_value(getattr(value, field)) for field, key in keys.items()}


def pop_group(data: dict[str, Any], keys: Mapping[str, str], switch: str) -> dict[str, Any] | None:
    """The fields of a group, or None where `switch` is absent, 0 or []: then only what says so again is taken out."""
    present = bool(data.get(switch))
    values = {field: data.pop(key) for field, key in keys.items() if key in data and (present or not data[key])}
    return values if present else None


def join_drafting_ratios(ratios: tuple[int, ...], drafting_layers: int) -> list[int]:
    """The file's `compress_ratios`: drafting layers append their zeros."""
    return [*ratios, *[0] * drafting_layers]


def split_drafting_ratios(fields: dict[str, Any]) -> None:
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
