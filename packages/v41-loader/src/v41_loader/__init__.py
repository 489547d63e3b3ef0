"""DeepSeek-V4.1-Flash: checkpoint reading, validation, TP/EP sharding and synthetic checkpoints.

Names that need torch are loaded when first used: inspecting and planning a checkpoint does not import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from v41_loader.digests import DigestAlgorithm
from v41_loader.errors import CheckpointError, OutputError, ShardingError, SynthesisError
from v41_loader.expected_tensors import ExpectedTensor, expected_tensor, expected_tensors
from v41_loader.inventory import Inventory, read_inventory
from v41_loader.partition import RankPart, SharedPart, rank_part, tensor_parts
from v41_loader.rules import RULES, Partition, TensorGroup, TensorRule
from v41_loader.sharding.manifest import Manifest
from v41_loader.sharding.shard_plan import RankPlan, ShardPlan, plan_shards
from v41_loader.sharding.sharder import ShardReport, shard_checkpoint
from v41_loader.sharding.verification import VerificationReport, verify_shards
from v41_loader.synth import SynthesisReport, synthesize_checkpoint, synthesize_headers

if TYPE_CHECKING:
    from v41_loader.checkpoint import Checkpoint, open_checkpoint
    from v41_loader.rank_loading import load_rank, rank_tensors
    from v41_loader.sharding.sharded_checkpoint import ShardedCheckpoint, open_shards
    from v41_loader.synth.tensors import synthesize_tensor
    from v41_loader.tensor_cutting import shard_tensor
    from v41_loader.weight_directory import open_weights

__all__ = [
    "RULES",
    "Checkpoint",
    "CheckpointError",
    "DigestAlgorithm",
    "ExpectedTensor",
    "Inventory",
    "Manifest",
    "OutputError",
    "Partition",
    "RankPart",
    "RankPlan",
    "ShardPlan",
    "ShardReport",
    "ShardedCheckpoint",
    "ShardingError",
    "SharedPart",
    "SynthesisError",
    "SynthesisReport",
    "TensorGroup",
    "TensorRule",
    "VerificationReport",
    "expected_tensor",
    "expected_tensors",
    "load_rank",
    "open_checkpoint",
    "open_shards",
    "open_weights",
    "plan_shards",
    "rank_part",
    "rank_tensors",
    "read_inventory",
    "shard_checkpoint",
    "shard_tensor",
    "synthesize_checkpoint",
    "synthesize_headers",
    "synthesize_tensor",
    "tensor_parts",
    "verify_shards",
]

_NEED_TORCH = {
    "Checkpoint": "v41_loader.checkpoint",
    "ShardedCheckpoint": "v41_loader.sharding.sharded_checkpoint",
    "open_checkpoint": "v41_loader.checkpoint",
    "load_rank": "v41_loader.rank_loading",
    "open_shards": "v41_loader.sharding.sharded_checkpoint",
    "open_weights": "v41_loader.weight_directory",
    "rank_tensors": "v41_loader.rank_loading",
    "shard_tensor": "v41_loader.tensor_cutting",
    "synthesize_tensor": "v41_loader.synth.tensors",
}


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        return getattr(importlib.import_module(_NEED_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
