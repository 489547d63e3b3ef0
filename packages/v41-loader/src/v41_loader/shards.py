"""A rank's tensors: read from a checkpoint without reading more, or cut from a tensor in memory."""

from __future__ import annotations

import torch

from v41_config.model_config import ModelConfig
from v41_config.parallel_layout import ParallelLayout
from v41_loader.checkpoint import Checkpoint
from v41_loader.errors import ShardingError, TensorDtypeError, TensorShapeError
from v41_loader.expected_tensors import expected_tensor
from v41_loader.partition import rank_part
from v41_loader.torch_dtypes import TORCH_DTYPES


def rank_tensors(checkpoint: Checkpoint, layout: ParallelLayout, rank: int) -> dict[str, torch.Tensor]:
    """What one rank holds, under the checkpoint's global names: its heads, output groups and vocabulary rows by TP,
    its experts by EP, the rest whole.

    Raises:
        LayoutError, ShardingError: as `rank_part`.
        CheckpointError: as `Checkpoint.part`.
    """
    tensors = {}
    for name in checkpoint.names:
        part = rank_part(checkpoint.inventory.tensors[name].expected, checkpoint.config, layout, rank)
        if part is not None:
            tensors[name] = checkpoint.part(name, part.axis, part.start, part.stop)
    return tensors


def shard_tensor(
    name: str, tensor: torch.Tensor, config: ModelConfig, layout: ParallelLayout, rank: int
) -> torch.Tensor:
    """A rank's part of a whole stored tensor, as a copy.

    Raises:
        UnknownTensorError: the config has no such tensor.
        TensorDtypeError, TensorShapeError: the tensor is not the stored form of `name`.
        ShardingError: the rank holds nothing of it; or as `rank_part`.
    """
    expected = expected_tensor(config, name)
    if tensor.dtype != TORCH_DTYPES[expected.dtype]:
        raise TensorDtypeError(name, tensor.dtype, str(TORCH_DTYPES[expected.dtype]))
    if tuple(tensor.shape) != expected.shape:
        raise TensorShapeError(name, list(tensor.shape), str(list(expected.shape)))
    part = rank_part(expected, config, layout, rank)
    if part is None:
        raise ShardingError(name, f"rank {rank} of tp={layout.tp}, dp={layout.dp}", "a rank that holds this tensor")
    if part.axis is not None:
        tensor = tensor.narrow(part.axis, part.start, part.stop - part.start)
    return tensor.clone(memory_format=torch.contiguous_format)
