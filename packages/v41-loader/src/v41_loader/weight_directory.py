"""Opens weights for serving, whichever way they are stored."""

from __future__ import annotations

from pathlib import Path

from v41_loader.checkpoint import Checkpoint, open_checkpoint
from v41_loader.errors import AmbiguousCheckpointError, EngramCheckpointError
from v41_loader.index import INDEX_FILE, MANIFEST_FILE, SINGLE_FILE
from v41_loader.inventory import NOT_COMPARABLE
from v41_loader.sharding.sharded_checkpoint import ShardedCheckpoint, open_shards
from v41_loader.source_files import source_exists


def open_weights(
    directory: str | Path, without_engram: bool = False, allowed_root: str | Path | None = None
) -> Checkpoint | ShardedCheckpoint:
    """Check and open a released-format directory, or one that `shard_checkpoint` completed in the canonical layout: it
    is told by its manifest.

    Args:
        without_engram: accept weights of a checkpoint with Engram, whose text without it is `NOT_COMPARABLE`.
        allowed_root: a directory outside that links of a checkpoint may end in.

    Raises:
        AmbiguousCheckpointError: both stand in one directory.
        EngramCheckpointError: weights of a checkpoint with Engram, and nobody said `without_engram`.
        CheckpointError, ConfigError: as `open_checkpoint` and `open_shards`.
    """
    directory = Path(directory)
    if not source_exists(directory, MANIFEST_FILE):
        return open_checkpoint(directory, without_engram=without_engram, allowed_root=allowed_root)
    for name in (INDEX_FILE, SINGLE_FILE):
        if source_exists(directory, name):
            raise AmbiguousCheckpointError(str(directory), [MANIFEST_FILE, name], "one of them")
    shards = open_shards(directory)
    if shards.notice and not without_engram:
        raise EngramCheckpointError(
            str(directory), "shards of a checkpoint with Engram", f"without_engram, which is {NOT_COMPARABLE}"
        )
    return shards
