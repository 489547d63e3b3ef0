"""Reads a config file in either of its formats: the released `config.json`, or `inference/config.json`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from v41_config.errors import ConfigError
from v41_config.inference_json import inference_fields, is_inference_json
from v41_config.json_keys import read_json
from v41_config.model_config import ModelConfig
from v41_config.released_json import released_fields

MAX_CONFIG_BYTES = 1 << 20
"""The released file has 4 kB."""


def read_config_file(path: Path) -> ModelConfig:
    """See `ModelConfig.from_json`. Keys nobody knows are named in a warning, never dropped in silence."""
    path = path / "config.json" if path.is_dir() else path
    data = _load_object(path)
    fields, unknown = inference_fields(data) if is_inference_json(data) else released_fields(data)
    if unknown:
        names = ", ".join(key if key.isprintable() else repr(key) for key in unknown)
        message = f"config keys that v41 does not know, ignored: {names}"
        # The file is at fault, not the caller's line, which Python would print below.
        warnings.warn_explicit(message, UserWarning, str(path), lineno=0)
    return ModelConfig.model_validate(fields)


def _load_object(path: Path) -> dict[str, Any]:
    data = read_json(path, MAX_CONFIG_BYTES, "config.json", ConfigError, "a JSON file", _of_repeated_key)
    if not isinstance(data, dict):
        raise ConfigError(str(path), type(data).__name__, "a JSON object")
    return data


def _of_repeated_key(key: str) -> ConfigError:
    return ConfigError(key, "two values", "one value for a key")
