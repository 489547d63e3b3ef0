"""The text model's weights as a rank holds them: operand, checkpoint name, dimensions, storage and class.

The one table from which operands of operators and bytes of a card derive. Engram, drafting and vision are no part of
it. Dimensions are those of a rank's share (`H_local`, `V_local`, ...); on a layout of one rank they are the
checkpoint's (model.md section 20).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod

from v41_config.data_types import DATA_TYPE_BYTES, DataType
from v41_config.dimensions import Dim, evaluate, model_sizes
from v41_config.model_config import ModelConfig
from v41_config.parallel_layout import ParallelLayout


class WeightClass(str, Enum):
    """What a plan adds up; the value is its key in JSON."""

    ROUTED_EXPERTS = "routed_experts"
    SHARED_EXPERTS = "shared_experts"
    ATTENTION = "attention"
    COMPRESSED_ATTENTION = "compressed_attention"
    ROUTER = "router"
    HYPER_CONNECTIONS = "hyper_connections"
    NORMS = "norms"
    EMBEDDING = "embedding"
    HEAD = "head"


class WeightLayers(str, Enum):
    """The layers that have a weight."""

    NONE = "once"
    ALL = "every layer"
    KV_SOURCES = "KV sources"
    POOLING_KV_SOURCES = "KV sources of ratio 2"
    INDEX_SOURCES = "index sources"

    def ids(self, config: ModelConfig) -> tuple[int, ...]:
        """Layer ids; one entry that means nothing for a weight that occurs once."""
        return {
            WeightLayers.NONE: (0,),
            WeightLayers.ALL: tuple(range(config.num_hidden_layers)),
            WeightLayers.KV_SOURCES: config.kv_source_layer_ids,
            WeightLayers.POOLING_KV_SOURCES: tuple(
                i for i in config.kv_source_layer_ids if config.compress_ratios[i] > 1
            ),
            WeightLayers.INDEX_SOURCES: config.index_source_layer_ids,
        }[self]


@dataclass(frozen=True)
class WeightSpec:
    """One stored tensor.

    `operand` is its name in operators, `checkpoint` the released name with `{layer}` and `{expert}`; `dims` count
    stored items: packed FP4 halves the input dimension, a scale divides by its group.
    """

    operand: str
    checkpoint: str
    dims: tuple[Dim, ...]
    dtype: DataType
    weight_class: WeightClass
    layers: WeightLayers

    @property
    def per_expert(self) -> bool:
        """Whether each routed expert has one."""
        return "{expert}" in self.checkpoint

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """A rank's part of one tensor, given `model_sizes`."""
        return tuple(evaluate(dim, sizes) for dim in self.dims)


def _fp8(
    operand: str, name: str, out: Dim, inp: Dim, weight_class: WeightClass, layers: WeightLayers = WeightLayers.ALL
) -> tuple[WeightSpec, WeightSpec]:
    """An E4M3 weight with an E8M0 scale for each tile of 32 x 32."""
    return (
        WeightSpec(operand, f"{name}.weight", (out, inp), "float8_e4m3fn", weight_class, layers),
        WeightSpec(f"{operand}_scale", f"{name}.scale", (f"{out}/MX", f"{inp}/MX"), "float8_e8m0fnu", weight_class,
                   layers),
    )  # fmt: skip


def _fp4_expert(operand: str, out: str, inp: str) -> tuple[WeightSpec, WeightSpec]:
    """A packed E2M1 weight with an E8M0 scale for every 32 inputs."""
    name, weight_class = f"layers.{{layer}}.ffn.experts.{{expert}}.{operand}", WeightClass.ROUTED_EXPERTS
    return (
        WeightSpec(operand, f"{name}.weight", (out, f"{inp}/2"), "int8", weight_class, WeightLayers.ALL),
        WeightSpec(f"{operand}_scale", f"{name}.scale", (out, f"{inp}/MX"), "float8_e8m0fnu", weight_class,
                   WeightLayers.ALL),
    )  # fmt: skip


def _plain(
    operand: str,
    name: str,
    dims: tuple[Dim, ...],
    weight_class: WeightClass,
    layers: WeightLayers = WeightLayers.ALL,
    dtype: DataType = "bfloat16",
) -> WeightSpec:
    return WeightSpec(operand, name, dims, dtype, weight_class, layers)


def _hyper_connection(sublayer: str) -> tuple[WeightSpec, ...]:
    name, weight_class = f"hc_{sublayer}", WeightClass.HYPER_CONNECTIONS
    parts: dict[str, tuple[Dim, ...]] = {"fn": ("HC_MIXES", "HC*D"), "base": ("HC_MIXES",), "scale": (3,)}
    return tuple(
        _plain(f"{name}_{part}", f"layers.{{layer}}.{name}_{part}", dims, weight_class, dtype="float32")
        for part, dims in parts.items()
    )


_LAYER, _ATTN, _FFN = "layers.{layer}.", "layers.{layer}.attn.", "layers.{layer}.ffn."
_ATTENTION, _COMPRESSED = WeightClass.ATTENTION, WeightClass.COMPRESSED_ATTENTION
_SHARED, _ROUTER = WeightClass.SHARED_EXPERTS, WeightClass.ROUTER
_KV_SOURCES = WeightLayers.KV_SOURCES

_WEIGHTS: tuple[WeightSpec, ...] = (
    *_fp4_expert("w1", "I", "D"),
    *_fp4_expert("w3", "I", "D"),
    *_fp4_expert("w2", "D", "I"),
    *_fp8("shared_w1", _FFN + "shared_experts.w1", "I", "D", _SHARED),
    *_fp8("shared_w3", _FFN + "shared_experts.w3", "I", "D", _SHARED),
    *_fp8("shared_w2", _FFN + "shared_experts.w2", "D", "I", _SHARED),
    *_fp8("wq_a", _ATTN + "wq_a", "Q_LORA", "D", _ATTENTION),
    _plain("q_norm", _ATTN + "q_norm.weight", ("Q_LORA",), _ATTENTION),
    *_fp8("wq_b", _ATTN + "wq_b", "H_local*HEAD_DIM", "Q_LORA", _ATTENTION),
    *_fp8("wkv", _ATTN + "wkv", "HEAD_DIM", "D", _ATTENTION),
    _plain("kv_norm", _ATTN + "kv_norm.weight", ("HEAD_DIM",), _ATTENTION),
    _plain("attn_sink", _ATTN + "attn_sink", ("H_local",), _ATTENTION, dtype="float32"),
    *_fp8("wo_a", _ATTN + "wo_a", "O_GROUPS_local*O_LORA", "H*HEAD_DIM/O_GROUPS", _ATTENTION),
    *_fp8("wo_b", _ATTN + "wo_b", "D", "O_GROUPS_local*O_LORA", _ATTENTION),
    _plain("compressor_wkv", _ATTN + "compressor.wkv.weight", ("HEAD_DIM", "D"), _COMPRESSED, _KV_SOURCES),
    _plain("compressor_wgate", _ATTN + "compressor.wgate.weight", ("HEAD_DIM", "D"), _COMPRESSED,
           WeightLayers.POOLING_KV_SOURCES),
    _plain("compressor_norm", _ATTN + "compressor.norm.weight", ("HEAD_DIM",), _COMPRESSED, _KV_SOURCES),
    _plain("index_wk", _ATTN + "indexer.wk.weight", ("INDEX_DIM", "HEAD_DIM"), _COMPRESSED, _KV_SOURCES),
    _plain("index_k_norm", _ATTN + "indexer.k_norm.weight", ("INDEX_DIM",), _COMPRESSED, _KV_SOURCES),
    # Whole on every rank: cutting the index heads would need an all-reduce of the whole score matrix.
    *_fp8("index_wq_b", _ATTN + "indexer.wq_b", "INDEX_HEADS*INDEX_DIM", "Q_LORA", _COMPRESSED,
          WeightLayers.INDEX_SOURCES),
    _plain("index_weights_proj", _ATTN + "indexer.weights_proj.weight", ("INDEX_HEADS", "D"), _COMPRESSED,
           WeightLayers.INDEX_SOURCES),
    _plain("gate_weight", _FFN + "gate.weight", ("E", "D"), _ROUTER),
    _plain("gate_bias", _FFN + "gate.bias", ("E",), _ROUTER, dtype="float32"),
    *_hyper_connection("attn"),
    *_hyper_connection("ffn"),
    _plain("attn_norm", _LAYER + "attn_norm.weight", ("D",), WeightClass.NORMS),
    _plain("ffn_norm", _LAYER + "ffn_norm.weight", ("D",), WeightClass.NORMS),
    _plain("norm", "norm.weight", ("D",), WeightClass.NORMS, WeightLayers.NONE),
    _plain("embed_weight", "embed.weight", ("V_local", "D"), WeightClass.EMBEDDING, WeightLayers.NONE),
    _plain("head_weight", "head.weight", ("V_local", "D"), WeightClass.HEAD, WeightLayers.NONE),
)  # fmt: skip

WEIGHTS: Mapping[str, WeightSpec] = {weight.operand: weight for weight in _WEIGHTS}
"""The table by operand name."""


@functools.lru_cache(maxsize=32)
def weight_bytes(config: ModelConfig, layout: ParallelLayout) -> Mapping[WeightClass, int]:
    """Bytes of one card for each class, as the checkpoint stores them.

    Raises:
        LayoutError: the layout does not divide the model.
    """
    sizes = model_sizes(config, layout)
    totals = dict.fromkeys(WeightClass, 0)
    for weight in _WEIGHTS:
        copies = len(weight.layers.ids(config)) * (sizes["E_local"] if weight.per_expert else 1)
        totals[weight.weight_class] += copies * prod(weight.shape(sizes)) * DATA_TYPE_BYTES[weight.dtype]
    return totals
