"""The one table of tensor names: what each tensor is, how it is stored and which ranks hold it (model.md section 20).

Everything else derives from these rules: expected names, dtypes and shapes, the parts of a rank, the skipped groups,
the reports and the synthetic checkpoints. Every name of the released checkpoint matches exactly one rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from v41_config.model_config import MX_GROUP, DraftingConfig, EngramConfig, ModelConfig, VisionConfig

RULES_VERSION = 1
"""Stands in every manifest; another number whenever a rule changes which bytes a rank holds."""

DTYPE_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
"""Bytes of one stored item of each safetensors dtype that the release uses."""


class TensorGroup(str, Enum):
    """The classes that reports add up."""

    EMBEDDING = "embedding"
    HEAD = "head"
    NORMS = "layer and final norms"
    ATTENTION = "attention"
    COMPRESSED_ATTENTION = "compressor and indexer"
    HYPER_CONNECTIONS = "hyper-connections"
    ROUTER = "router"
    SHARED_EXPERTS = "shared experts"
    ROUTED_EXPERTS = "routed experts"
    ROUTER_VISION_BIAS = "router bias of image tokens"
    ENGRAM = "Engram"
    DRAFTING = "drafting"
    VISION = "vision"


class Partition(str, Enum):
    """What decides a rank's part of a tensor: a range of TP units along `TensorRule.axis`, or ownership by EP."""

    REPLICATED = "replicated"
    HEADS = "TP heads"
    OUTPUT_GROUPS = "TP output groups"
    VOCABULARY = "TP vocabulary"
    EXPERTS = "EP experts"
    SKIPPED = "skipped"


class Layers(str, Enum):
    """The layers in which a rule's tensor occurs (ids that `{layer}` takes)."""

    NONE = "once"
    ALL = "every backbone layer"
    KV_SOURCES = "KV sources"
    POOLING_KV_SOURCES = "KV sources of ratio 2"
    INDEX_SOURCES = "index sources"
    ENGRAM = "Engram layers"
    DRAFTING = "drafting layers"
    FIRST_DRAFTING = "first drafting layer"
    LAST_DRAFTING = "last drafting layer"
    VISION_TOWER = "once, with a vision tower"
    VISION_BLOCKS = "vision blocks"


@dataclass(frozen=True)
class TensorRule:
    """One kind of tensor.

    `pattern` is the name with `{layer}` and `{expert}` for its indices. `dims` are logical extents (names of
    `dimension`, or literals) of the weight, `granularity` how many logical elements one stored item spans along each
    of them: (1, 2) for packed FP4, (32, 32) for the scale of an FP8 weight, so that a scale is cut exactly where
    its weight is. `scales` is the pattern of the weight that a scale belongs to. `axis` is the cut dimension.
    """

    pattern: str
    dtype: str
    dims: tuple[str | int, ...]
    group: TensorGroup
    layers: Layers = Layers.NONE
    partition: Partition = Partition.REPLICATED
    axis: int | None = None
    granularity: tuple[int, ...] = ()
    scales: str | None = None

    @property
    def item_extents(self) -> tuple[int, ...]:
        """`granularity` with its default, one element per item, filled in."""
        return self.granularity or (1,) * len(self.dims)


def _engram(config: ModelConfig) -> EngramConfig:
    assert config.engram is not None
    return config.engram


def _drafting(config: ModelConfig) -> DraftingConfig:
    assert config.drafting is not None
    return config.drafting


def _vision(config: ModelConfig) -> VisionConfig:
    assert config.vision is not None
    return config.vision


_DIMENSIONS: dict[str, Callable[[ModelConfig, int], int]] = {
    "query_width": lambda c, _: c.num_attention_heads * c.head_dim,
    "output_group_input": lambda c, _: c.num_attention_heads * c.head_dim // c.o_groups,
    "output_width": lambda c, _: c.o_groups * c.o_lora_rank,
    "index_query_width": lambda c, _: c.index_n_heads * c.index_head_dim,
    "hc_scales": lambda _c, _: 3,
    "engram_rows": lambda c, layer: _engram(c).num_embeddings[_engram(c).layer_ids.index(layer)],
    "engram_row_width": lambda c, _: _engram(c).head_dim,
    "engram_input": lambda c, _: (_engram(c).max_ngram_size - 1) * _engram(c).n_heads * _engram(c).head_dim,
    "engram_output": lambda c, _: (c.hc_mult + 1) * c.hidden_size,
    "drafting_experts": lambda c, _: _drafting(c).n_routed_experts,
    "drafting_taps": lambda c, _: len(_drafting(c).target_layer_ids) * c.hidden_size,
    "markov_rank": lambda c, _: _drafting(c).markov_rank,
    "confidence_input": lambda c, _: c.hidden_size + _drafting(c).markov_rank,
    "vision_width": lambda c, _: _vision(c).hidden_size,
    "vision_qkv": lambda c, _: 3 * _vision(c).hidden_size,
    "vision_mlp": lambda c, _: _vision(c).intermediate_size,
    "vision_gated_mlp": lambda c, _: 2 * _vision(c).intermediate_size,
    "vision_patch": lambda c, _: 3 * _vision(c).patch_size ** 2,
    "aligner_input": lambda c, _: _vision(c).hidden_size * _vision(c).downsample_ratio ** 2,
}


def dimension(name: str | int, config: ModelConfig, layer: int) -> int:
    """A logical extent: a literal, a derived dimension, or a field or property of `ModelConfig`."""
    if isinstance(name, int):
        return name
    derived = _DIMENSIONS.get(name)
    value = derived(config, layer) if derived else getattr(config, name)
    assert isinstance(value, int)
    return value


def layer_ids(layers: Layers, config: ModelConfig) -> Sequence[int]:
    """The values of `{layer}`; one entry, never written, for a tensor that occurs once. Long ones are ranges: a config
    may state any number of layers."""
    drafting = range(config.drafting.num_nextn_predict_layers if config.drafting else 0)
    ids: dict[Layers, Sequence[int]] = {
        Layers.NONE: (0,),
        Layers.ALL: range(config.num_hidden_layers),
        Layers.KV_SOURCES: config.kv_source_layer_ids,
        Layers.POOLING_KV_SOURCES: tuple(i for i in config.kv_source_layer_ids if config.compress_ratios[i] > 1),
        Layers.INDEX_SOURCES: config.index_source_layer_ids,
        Layers.ENGRAM: config.engram.layer_ids if config.engram else (),
        Layers.DRAFTING: drafting,
        Layers.FIRST_DRAFTING: drafting[:1],
        Layers.LAST_DRAFTING: drafting[-1:],
        Layers.VISION_TOWER: (0,) if config.vision else (),
        Layers.VISION_BLOCKS: range(config.vision.num_hidden_layers if config.vision else 0),
    }
    return ids[layers]


def _quantised(
    name: str,
    weight_dtype: str,
    dims: tuple[str, str],
    group: TensorGroup,
    layers: Layers = Layers.ALL,
    partition: Partition = Partition.REPLICATED,
    axis: int | None = None,
    scale_tile: tuple[int, int] = (MX_GROUP, MX_GROUP),
) -> tuple[TensorRule, TensorRule]:
    """A weight and its scale, cut alike."""
    packing = (1, 2) if weight_dtype == "I8" else (1, 1)
    weight = TensorRule(f"{name}.weight", weight_dtype, dims, group, layers, partition, axis, packing)
    scale = TensorRule(f"{name}.scale", "F8_E8M0", dims, group, layers, partition, axis, scale_tile, weight.pattern)
    return weight, scale


_BLOCK, _ATTN, _FFN = "layers.{layer}.", "layers.{layer}.attn.", "layers.{layer}.ffn."
_EXPERT = _FFN + "experts.{expert}."


def _expert(name: str, out: str, inp: str) -> tuple[TensorRule, TensorRule]:
    return _quantised(_EXPERT + name, "I8", (out, inp), TensorGroup.ROUTED_EXPERTS,
                      partition=Partition.EXPERTS, scale_tile=(1, MX_GROUP))  # fmt: skip


def _plain(
    name: str,
    dtype: str,
    *dims: str | int,
    group: TensorGroup,
    layers: Layers = Layers.ALL,
    partition: Partition = Partition.REPLICATED,
    axis: int | None = None,
) -> TensorRule:
    return TensorRule(name, dtype, dims, group, layers, partition, axis)


def _hyper_connections(sublayer: str) -> tuple[TensorRule, ...]:
    name, group = f"{_BLOCK}hc_{sublayer}", TensorGroup.HYPER_CONNECTIONS
    return (
        _plain(f"{name}_fn", "F32", "hc_mixes", "hc_dim", group=group),
        _plain(f"{name}_base", "F32", "hc_mixes", group=group),
        _plain(f"{name}_scale", "F32", "hc_scales", group=group),
    )


_ATTENTION, _COMPRESSED = TensorGroup.ATTENTION, TensorGroup.COMPRESSED_ATTENTION
_HEADS, _OUTPUT_GROUPS = Partition.HEADS, Partition.OUTPUT_GROUPS

BLOCK_RULES: tuple[TensorRule, ...] = (
    *_quantised(_ATTN + "wq_a", "F8_E4M3", ("q_lora_rank", "hidden_size"), _ATTENTION),
    _plain(_ATTN + "q_norm.weight", "BF16", "q_lora_rank", group=_ATTENTION),
    *_quantised(_ATTN + "wq_b", "F8_E4M3", ("query_width", "q_lora_rank"), _ATTENTION, partition=_HEADS, axis=0),
    *_quantised(_ATTN + "wkv", "F8_E4M3", ("head_dim", "hidden_size"), _ATTENTION),
    _plain(_ATTN + "kv_norm.weight", "BF16", "head_dim", group=_ATTENTION),
    *_quantised(_ATTN + "wo_a", "F8_E4M3", ("output_width", "output_group_input"), _ATTENTION,
                partition=_OUTPUT_GROUPS, axis=0),
    *_quantised(_ATTN + "wo_b", "F8_E4M3", ("hidden_size", "output_width"), _ATTENTION,
                partition=_OUTPUT_GROUPS, axis=1),
    _plain(_ATTN + "attn_sink", "F32", "num_attention_heads", group=_ATTENTION, partition=_HEADS, axis=0),
    _plain(_BLOCK + "attn_norm.weight", "BF16", "hidden_size", group=TensorGroup.NORMS),
    _plain(_BLOCK + "ffn_norm.weight", "BF16", "hidden_size", group=TensorGroup.NORMS),
    *_hyper_connections("attn"),
    *_hyper_connections("ffn"),
    _plain(_FFN + "gate.weight", "BF16", "n_routed_experts", "hidden_size", group=TensorGroup.ROUTER),
    _plain(_FFN + "gate.bias", "F32", "n_routed_experts", group=TensorGroup.ROUTER),
    _plain(_FFN + "gate.bias_vl", "F32", "n_routed_experts", group=TensorGroup.ROUTER_VISION_BIAS,
           partition=Partition.SKIPPED),
    *_quantised(_FFN + "shared_experts.w1", "F8_E4M3", ("moe_intermediate_size", "hidden_size"),
                TensorGroup.SHARED_EXPERTS),
    *_quantised(_FFN + "shared_experts.w3", "F8_E4M3", ("moe_intermediate_size", "hidden_size"),
                TensorGroup.SHARED_EXPERTS),
    *_quantised(_FFN + "shared_experts.w2", "F8_E4M3", ("hidden_size", "moe_intermediate_size"),
                TensorGroup.SHARED_EXPERTS),
    *_expert("w1", "moe_intermediate_size", "hidden_size"),
    *_expert("w3", "moe_intermediate_size", "hidden_size"),
    *_expert("w2", "hidden_size", "moe_intermediate_size"),
)  # fmt: skip
"""What every transformer block has, drafting layers too."""

_COMPRESSED_RULES: tuple[TensorRule, ...] = (
    _plain(_ATTN + "compressor.wkv.weight", "BF16", "head_dim", "hidden_size", group=_COMPRESSED,
           layers=Layers.KV_SOURCES),
    _plain(_ATTN + "compressor.norm.weight", "BF16", "head_dim", group=_COMPRESSED, layers=Layers.KV_SOURCES),
    _plain(_ATTN + "compressor.wgate.weight", "BF16", "head_dim", "hidden_size", group=_COMPRESSED,
           layers=Layers.POOLING_KV_SOURCES),
    _plain(_ATTN + "indexer.wk.weight", "BF16", "index_head_dim", "head_dim", group=_COMPRESSED,
           layers=Layers.KV_SOURCES),
    _plain(_ATTN + "indexer.k_norm.weight", "BF16", "index_head_dim", group=_COMPRESSED, layers=Layers.KV_SOURCES),
    # Replicated: cutting the index heads would need an all-reduce of the whole score matrix.
    *_quantised(_ATTN + "indexer.wq_b", "F8_E4M3", ("index_query_width", "q_lora_rank"), _COMPRESSED,
                layers=Layers.INDEX_SOURCES),
    _plain(_ATTN + "indexer.weights_proj.weight", "BF16", "index_n_heads", "hidden_size", group=_COMPRESSED,
           layers=Layers.INDEX_SOURCES),
)  # fmt: skip

_GLOBAL_RULES: tuple[TensorRule, ...] = (
    _plain("embed.weight", "BF16", "vocab_size", "hidden_size", group=TensorGroup.EMBEDDING, layers=Layers.NONE,
           partition=Partition.VOCABULARY, axis=0),
    _plain("head.weight", "BF16", "vocab_size", "hidden_size", group=TensorGroup.HEAD, layers=Layers.NONE,
           partition=Partition.VOCABULARY, axis=0),
    _plain("norm.weight", "BF16", "hidden_size", group=TensorGroup.NORMS, layers=Layers.NONE),
)  # fmt: skip


def _skipped(rules: tuple[TensorRule, ...], group: TensorGroup) -> tuple[TensorRule, ...]:
    return tuple(dataclasses.replace(r, group=group, partition=Partition.SKIPPED, axis=None) for r in rules)


def _drafting_block(rule: TensorRule) -> TensorRule:
    """The rule of a backbone block at the name and expert count of a drafting layer."""

    def moved(name: str) -> str:
        return name.replace("layers.{layer}.", "mtp.{layer}.", 1)

    dims = tuple("drafting_experts" if d == "n_routed_experts" else d for d in rule.dims)
    scales = moved(rule.scales) if rule.scales else None
    return dataclasses.replace(rule, pattern=moved(rule.pattern), dims=dims, layers=Layers.DRAFTING, scales=scales)


_ENGRAM = "layers.{layer}.engram."
_ENGRAM_RULES = _skipped(
    (
        *_quantised(_ENGRAM + "embed", "F8_E4M3", ("engram_rows", "engram_row_width"), TensorGroup.ENGRAM,
                    layers=Layers.ENGRAM, scale_tile=(1, MX_GROUP)),
        *_quantised(_ENGRAM + "wkv", "F8_E4M3", ("engram_output", "engram_input"), TensorGroup.ENGRAM,
                    layers=Layers.ENGRAM),
        _plain(_ENGRAM + "q_weight", "BF16", "hc_mult", "hidden_size", group=TensorGroup.ENGRAM, layers=Layers.ENGRAM),
        _plain(_ENGRAM + "k_weight", "BF16", "hc_mult", "hidden_size", group=TensorGroup.ENGRAM, layers=Layers.ENGRAM),
    ),
    TensorGroup.ENGRAM,
)  # fmt: skip

_MTP = "mtp.{layer}."


def _drafting_extra(name: str, *dims: str | int, layers: Layers = Layers.LAST_DRAFTING) -> TensorRule:
    return _plain(_MTP + name, "BF16", *dims, group=TensorGroup.DRAFTING, layers=layers)


_DRAFTING_RULES = _skipped(
    (
        *(_drafting_block(rule) for rule in BLOCK_RULES),
        *_quantised(_MTP + "main_proj", "F8_E4M3", ("hidden_size", "drafting_taps"), TensorGroup.DRAFTING,
                    layers=Layers.FIRST_DRAFTING),
        _drafting_extra("main_norm.weight", "hidden_size", layers=Layers.FIRST_DRAFTING),
        _drafting_extra("norm.weight", "hidden_size"),
        _drafting_extra("markov_head.embed.weight", "vocab_size", "markov_rank"),
        _drafting_extra("markov_head.head.weight", "vocab_size", "markov_rank"),
        _drafting_extra("confidence_head.proj.weight", 1, "confidence_input"),
    ),
    TensorGroup.DRAFTING,
)  # fmt: skip


def _vision_rule(name: str, *dims: str, layers: Layers = Layers.VISION_TOWER) -> TensorRule:
    return _plain(name, "BF16", *dims, group=TensorGroup.VISION, layers=layers)


def _vision_block(name: str, *dims: str) -> TensorRule:
    return _vision_rule("vision.blocks.{layer}." + name, *dims, layers=Layers.VISION_BLOCKS)


_VISION_RULES = _skipped(
    (
        _vision_rule("vision.patch_embed.proj.weight", "vision_width", "vision_patch"),
        _vision_rule("vision.patch_embed.proj.bias", "vision_width"),
        _vision_rule("vision.norm.weight", "vision_width"),
        _vision_block("norm1.weight", "vision_width"),
        _vision_block("attn.wqkv.weight", "vision_qkv", "vision_width"),
        _vision_block("attn.wqkv.bias", "vision_qkv"),
        _vision_block("attn.wo.weight", "vision_width", "vision_width"),
        _vision_block("attn.wo.bias", "vision_width"),
        _vision_block("norm2.weight", "vision_width"),
        _vision_block("mlp.w1.weight", "vision_gated_mlp", "vision_width"),
        _vision_block("mlp.w2.weight", "vision_width", "vision_mlp"),
        _vision_rule("aligner.w1.weight", "hidden_size", "aligner_input"),
        _vision_rule("aligner.w1.bias", "hidden_size"),
        _vision_rule("aligner.w2.weight", "hidden_size", "hidden_size"),
        _vision_rule("aligner.w2.bias", "hidden_size"),
        _vision_rule("image_start", "hidden_size"),
        _vision_rule("image_end", "hidden_size"),
        _vision_rule("image_newline", "hidden_size"),
    ),
    TensorGroup.VISION,
)  # fmt: skip

RULES: tuple[TensorRule, ...] = (
    *_GLOBAL_RULES,
    *BLOCK_RULES,
    *_COMPRESSED_RULES,
    *_ENGRAM_RULES,
    *_DRAFTING_RULES,
    *_VISION_RULES,
)
"""The table."""
