"""A layer's weights from the table of weights: random bytes in the checkpoint's formats, with numbers near 1."""

from __future__ import annotations

from torch import Tensor

from v41_config import ModelConfig, ParallelLayout, TensorSpec
from v41_config.dimensions import model_sizes
from v41_config.weight_table import WEIGHTS
from v41_goldens import LayerWeights
from v41_goldens.fixtures.random_tensors import RandomTensors


def random_layer(config: ModelConfig, layer_id: int, seed: int = 0) -> LayerWeights:
    """The weights of one layer with all of the config's experts."""
    sizes = model_sizes(config, ParallelLayout())
    tensors: dict[str, Tensor] = {}
    for weight in WEIGHTS.values():
        if "{layer}" not in weight.checkpoint or layer_id not in weight.layers.ids(config):
            continue
        for expert in range(config.n_routed_experts) if weight.per_expert else (0,):
            shape = weight.shape(sizes)
            spec = TensorSpec(weight.operand, weight.dims, weight.dtype)
            name = weight.checkpoint.format(layer=layer_id, expert=expert)
            shape = shape[1:] if weight.per_expert and len(shape) == 3 else shape
            tensors[name] = RandomTensors(seed, f"{layer_id}/{expert}").operand(spec, shape)
    return LayerWeights.from_tensors(config, layer_id, tensors)
