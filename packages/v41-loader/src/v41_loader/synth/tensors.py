"""One synthetic tensor as a torch tensor, without the rest of its checkpoint."""

from __future__ import annotations

import numpy as np
import torch

from v41_config.model_config import ModelConfig
from v41_loader.expected_tensors import expected_tensor
from v41_loader.synth.row_bands import make_band, row_bands
from v41_loader.torch_dtypes import TORCH_DTYPES


def synthesize_tensor(config: ModelConfig, seed: int, name: str) -> torch.Tensor:
    """The tensor `name` of the synthetic checkpoint `(config, seed)`: a pure function of these three.

    Returns:
        The stored form: BF16 or F32, `float8_e4m3fn` codes, `float8_e8m0fnu` scales, or `int8` packed E2M1 `[N, K/2]`.

    Raises:
        UnknownTensorError: the config has no such tensor.
        SynthesisError: a tensor outside text inference.
    """
    tensor = expected_tensor(config, name)
    scale = tensor.rule.scales is not None
    source = expected_tensor(config, f"{name.removesuffix('.scale')}.weight") if scale else tensor
    parts = [make_band(band, seed)[1 if scale else 0] for band in row_bands(source)]
    stored = torch.from_numpy(np.concatenate([part for part in parts if part is not None]))
    return stored.view(TORCH_DTYPES[tensor.dtype]).reshape(tensor.shape)
