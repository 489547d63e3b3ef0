"""Which distribution each tensor of a synthetic checkpoint is drawn from: one table beside the rules of the names.

Numbers are chosen so that activations keep their size from layer to layer, block scales differ, selections are
decided by more than noise and the SwiGLU limit acts in one layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from v41_loader.errors import SynthesisError
from v41_loader.expected_tensors import ExpectedTensor

HOT_LAYER = 3
"""The layer whose shared expert passes the SwiGLU limit on purpose."""


@dataclass(frozen=True)
class Normal:
    """`mean + std * normal`; with `fan_in` the std is divided by the root of the last dimension."""

    std: float
    mean: float = 0.0
    fan_in: bool = False

    def scaled_std(self, inp: int) -> float:
        return self.std / inp**0.5 if self.fan_in else self.std


@dataclass(frozen=True)
class Uniform:
    """Values in [low, high)."""

    low: float
    high: float


@dataclass(frozen=True)
class Matrix:
    """A quantised weight: std `gain / sqrt(inp)`, rows and columns of different size."""

    gain: float


@dataclass(frozen=True)
class MixBase:
    """Bias of the hyper-connection mixes: normal, with a random permutation favoured in the square part."""

    std: float = 0.4
    permutation: float = 1.2


Distribution = Normal | Uniform | Matrix | MixBase

_NORM = Normal(0.15, mean=1.0)
_BY_FAN_IN = Normal(1.0, fan_in=True)

_RECIPES: dict[str, Distribution] = {
    "embed.weight": Normal(8.0),
    "norm.weight": _NORM,
    "head.weight": Normal(2.5, fan_in=True),
    "attn.wq_a.weight": Matrix(1.0),
    "attn.q_norm.weight": _NORM,
    "attn.wq_b.weight": Matrix(1.3),
    "attn.wkv.weight": Matrix(1.0),
    "attn.kv_norm.weight": _NORM,
    "attn.wo_a.weight": Matrix(1.4),
    "attn.wo_b.weight": Matrix(0.6),
    "attn.attn_sink": Uniform(-3.0, 2.5),
    "attn_norm.weight": _NORM,
    "ffn_norm.weight": _NORM,
    "hc_attn_fn": _BY_FAN_IN,
    "hc_attn_base": MixBase(),
    "hc_attn_scale": Uniform(0.5, 1.0),
    "hc_ffn_fn": _BY_FAN_IN,
    "hc_ffn_base": MixBase(),
    "hc_ffn_scale": Uniform(0.5, 1.0),
    "ffn.gate.weight": Normal(2.5, fan_in=True),
    "ffn.gate.bias": Normal(0.25),
    "ffn.gate.bias_vl": Normal(0.25),
    "ffn.shared_experts.w1.weight": Matrix(1.5),
    "ffn.shared_experts.w3.weight": Matrix(1.5),
    "ffn.shared_experts.w2.weight": Matrix(0.3),
    "ffn.experts.{expert}.w1.weight": Matrix(1.5),
    "ffn.experts.{expert}.w3.weight": Matrix(1.5),
    "ffn.experts.{expert}.w2.weight": Matrix(0.3),
    "attn.compressor.wkv.weight": _BY_FAN_IN,
    "attn.compressor.norm.weight": _NORM,
    "attn.compressor.wgate.weight": Normal(1.5, fan_in=True),
    "attn.indexer.wk.weight": _BY_FAN_IN,
    "attn.indexer.k_norm.weight": _NORM,
    "attn.indexer.wq_b.weight": Matrix(1.5),
    "attn.indexer.weights_proj.weight": _BY_FAN_IN,
}
_HOT_RECIPES: dict[str, Distribution] = {
    "ffn.shared_experts.w1.weight": Matrix(4.0),
    "ffn.shared_experts.w3.weight": Matrix(4.0),
    "ffn.shared_experts.w2.weight": Matrix(0.06),
}
_LAYER = "layers.{layer}."


def distribution_of(tensor: ExpectedTensor) -> Distribution | None:
    """The recipe of a tensor; None for what synthetic checkpoints leave out (Engram, drafting, vision) and for scales,
    which come with their weight."""
    name = tensor.rule.pattern.removeprefix(_LAYER)
    if tensor.layer == HOT_LAYER and name in _HOT_RECIPES:
        return _HOT_RECIPES[name]
    return _RECIPES.get(name)


def stream_name(tensor: ExpectedTensor) -> str:
    """The name that keys a tensor's random stream: a quantised weight's without `.weight`, else its own.

    Raises:
        SynthesisError: there is no recipe for this tensor.
    """
    distribution = distribution_of(tensor)
    if distribution is None:
        raise SynthesisError("tensor", tensor.name, "a tensor of text inference, which has a recipe")
    return tensor.name.removesuffix(".weight") if isinstance(distribution, Matrix) else tensor.name
