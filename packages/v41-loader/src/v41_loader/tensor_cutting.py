"""Cuts a rank's part from a whole tensor in memory."""

from __future__ import annotations

import torch

from v41_config.model_config import ModelConfig
from v41_config.parallel_layout import ParallelLayout
from v41_loader.errors import ShardingError, TensorDtypeError, TensorShapeError
from v41_loader.expected_tensors import expected_tensor
from v41_loader.partition import rank_part
from v41_loader.torch_dtypes import TORCH_DTYPES


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
