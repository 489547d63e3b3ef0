"""How a synthetic checkpoint comes into being: all at once, with its index and config."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from v41_config.model_config import ModelConfig
from v41_loader.errors import SynthesisError
from v41_loader.index import INDEX_FILE
from v41_loader.inventory import CONFIG_FILE


@contextmanager
def appearing_at_once(directory: Path) -> Iterator[Path]:
    """A staging directory beside `directory` that takes its place on success and vanishes on failure."""
    target = Path(os.path.realpath(directory))
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        found = sorted(entry.name for entry in target.iterdir()) if target.is_dir() else "a file"
        raise SynthesisError(str(directory), found, "an empty or new directory")
    staging = target.parent / f".{target.name}.{secrets.token_hex(8)}.partial"
    try:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            staging.mkdir()
        except OSError as error:
            raise SynthesisError(str(directory), error.strerror, "a place where directories can be made") from error
        yield staging
        os.replace(staging, target)
    except OSError as error:
        raise SynthesisError(str(directory), error.strerror, "a place that takes the whole checkpoint") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_descriptions(directory: Path, config: ModelConfig, weight_map: Mapping[str, str], total_size: int) -> None:
    """Write the index of shards, and `config.json` as released."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=1))
    (directory / CONFIG_FILE).write_text(json.dumps(config.to_released_json(), indent=2))
