"""Names of a checkpoint's files, and the index that says which shard holds which tensor."""

from __future__ import annotations

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def shard_file(shard: int, shards: int) -> str:
    """The file name of shard `shard` (from 0) of `shards`."""
    return f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
