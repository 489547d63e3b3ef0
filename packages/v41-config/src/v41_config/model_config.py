"""`ModelConfig`: the released `config.json` as one frozen, validated value."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler

from v41_config.config_bounds import (
    CandidateBlock,
    Entries,
    Epsilon,
    Experts,
    Factor,
    Heads,
    Id,
    IdTuple,
    IntTuple,
    Iterations,
    Layers,
    Number,
    Positions,
    RopeBase,
    Size,
    SizeTuple,
    Streams,
    Vocabulary,
    Width,
)
from v41_config.errors import ConfigError
from v41_config.layer_plan import LayerConfig, attention_mode
from v41_config.validation_words import first_refusal

if TYPE_CHECKING:
    from v41_config.parallel_layout import ParallelLayout

MX_GROUP = 32
"""Elements that share one E8M0 scale (weights and activations; model.md section 2)."""

FP4_CACHE_GROUP = 16
"""Elements of a compressed KV row that share one E4M3 scale (model.md section 2.6)."""


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


class RopeScaling(_Group):
    """YaRN parameters of the compressed profile (model.md section 7)."""

    rope_type: Literal["yarn"] = "yarn"
    factor: Factor
    beta_fast: Factor
    beta_slow: Factor
    original_max_position_embeddings: Positions


class QuantizationConfig(_Group):
    """The only number formats this model was released in."""

    quant_method: Literal["fp8"] = "fp8"
    activation_scheme: Literal["dynamic"] = "dynamic"
    weight_block_size: IntTuple = (MX_GROUP, MX_GROUP)
    scale_fmt: Literal["ue8m0"] = "ue8m0"
    expert_dtype: Literal["fp4"] = "fp4"

    @field_validator("weight_block_size")
    @classmethod
    def _released_block(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if value != (MX_GROUP, MX_GROUP):
            raise ValueError(f"[{MX_GROUP}, {MX_GROUP}]")
        return value


class EngramConfig(_Group):
    """The n-gram memory, out of scope here: kept so that a checkpoint with it is recognised and sized."""

    layer_ids: IdTuple
    num_embeddings: SizeTuple
    max_ngram_size: Iterations
    vocab_size: Size
    n_heads: Heads
    head_dim: Width
    pad_token_id: Id
    compressed_vocab_size: Size


class DraftingConfig(_Group):
    """The drafting (DSpark) layers, out of scope here: kept for checkpoint sizes."""

    num_nextn_predict_layers: Layers
    block_size: Entries
    noise_token_id: Id
    target_layer_ids: IdTuple
    markov_rank: Width
    n_routed_experts: Experts
    num_experts_per_tok: Experts


class VisionConfig(_Group):
    """The vision tower, out of scope here: kept for checkpoint sizes."""

    model_type: Literal["deepseek_v41_vision"] = "deepseek_v41_vision"
    num_hidden_layers: Layers
    hidden_size: Width
    num_attention_heads: Heads
    intermediate_size: Width
    patch_size: Width
    rope_theta: RopeBase
    downsample_ratio: Iterations
    max_image_tokens: Positions
    min_pixels: Size
    max_wh_ratio: Number | None = None


class ModelConfig(_Group):
    """DeepSeek-V4.1-Flash text model; field names are those of the released `text_config` (model.md section 1).

    `compress_ratios` has one entry per backbone layer. `engram`, `drafting` and `vision` are the groups that
    text inference leaves out, None where a checkpoint has none.

    Raises:
        ConfigError: naming the field, its value and the rule, from the constructor too.
    """

    vocab_size: Vocabulary
    hidden_size: Width
    moe_intermediate_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Heads
    num_key_value_heads: Literal[1] = 1
    head_dim: Width
    qk_rope_head_dim: Width
    q_lora_rank: Width
    o_lora_rank: Width
    o_groups: Heads
    hidden_act: Literal["silu"] = "silu"
    swiglu_limit: Factor
    rms_norm_eps: Epsilon
    attention_bias: Literal[False] = False
    attention_dropout: Number = 0.0
    initializer_range: Number = 0.02
    use_cache: bool = True
    tie_word_embeddings: Literal[False] = False
    max_position_embeddings: Positions
    rope_theta: RopeBase
    rope_scaling: RopeScaling
    compress_rope_theta: RopeBase
    n_routed_experts: Experts
    n_shared_experts: Literal[1] = 1
    num_experts_per_tok: Experts
    scoring_func: Literal["sqrtsoftplus"] = "sqrtsoftplus"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    norm_topk_prob: Literal[True] = True
    routed_scaling_factor: Factor
    sliding_window: Entries
    compress_ratios: IntTuple
    kv_source_layer_ids: IntTuple
    index_source_layer_ids: IntTuple
    index_n_heads: Heads
    index_head_dim: Width
    index_topk: Entries
    candidate_source_layer_id: int
    candidate_topk_blocks: Entries
    candidate_block_size: CandidateBlock
    hc_mult: Streams
    hc_sinkhorn_iters: Iterations
    hc_eps: Epsilon

    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int | None = None
    transformers_version: str = "5.6.0"
    quantization: QuantizationConfig = QuantizationConfig()
    engram: EngramConfig | None = None
    drafting: DraftingConfig | None = None
    vision: VisionConfig | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _one_typed_error(cls, data: Any, handler: ModelWrapValidatorHandler[ModelConfig]) -> ModelConfig:
        try:
            config = handler(data)
        except ValidationError as error:
            raise ConfigError(*first_refusal(error, "config")) from None
        _check_consistency(config)
        return config

    @staticmethod
    def from_json(path: str | Path) -> ModelConfig:
        """Read a released `config.json` or an `inference/config.json`, given the file or its directory.

        Keys that are unknown are named in a warning and ignored.

        Raises:
            ConfigError: not JSON, another `model_type`, no quantisation, a missing or inconsistent field.
        """
        from v41_config.config_file import read_config_file  # it builds on this module

        return read_config_file(Path(path))

    def to_released_json(self) -> dict[str, Any]:
        """The nested dictionary of the released `config.json`; `json.dumps(..., indent=2)` gives the file."""
        from v41_config.released_json import released_json  # it builds on this module

        return released_json(self)

    def to_inference_json(self) -> dict[str, Any]:
        """The flat dictionary of `inference/config.json`, which has no place for token ids and vision."""
        from v41_config.inference_json import inference_json  # it builds on this module

        return inference_json(self)

    def scaled(
        self,
        *,
        hidden_size: int = 256,
        num_hidden_layers: int = 10,
        vocab_size: int = 512,
        max_position_embeddings: int = 4096,
        layout: ParallelLayout | None = None,
        **changes: object,
    ) -> ModelConfig:
        """A small text model of the same structure: every attention mode occurs, and everything fits together.

        Widths shrink with `hidden_size` to multiples of 32, roles are dealt out in this model's proportions, and what
        `layout` shares out (heads, output groups, vocabulary, experts) is rounded up to what it divides.

        Args:
            changes: fields to set besides; they are checked as any other.

        Raises:
            ConfigError: fewer than six layers, or sizes that no consistent model has.
            LayoutError: `changes` that `layout` does not divide.
        """
        from v41_config.scaled_config import scaled_config  # it builds on this module

        return scaled_config(
            self,
            hidden_size=hidden_size,
            num_hidden_layers=num_hidden_layers,
            vocab_size=vocab_size,
            max_position_embeddings=max_position_embeddings,
            layout=layout,
            **changes,
        )

    def layer_config(self, layer_id: int) -> LayerConfig:
        """The role of one layer: the only place that decides mode, KV, index and candidate source."""
        plan = _layer_plan(self.compress_ratios, self.kv_source_layer_ids, self.index_source_layer_ids,
                           self.candidate_source_layer_id)  # fmt: skip
        if not 0 <= layer_id < len(plan):
            raise ConfigError("layer_id", layer_id, f"0 <= layer_id < {len(plan)}")
        return plan[layer_id]

    @property
    def layers(self) -> tuple[LayerConfig, ...]:
        """Every layer's role, in order."""
        return tuple(self.layer_config(i) for i in range(self.num_hidden_layers))

    @property
    def hc_dim(self) -> int:
        """Width of the flattened residual streams, `HC * D`."""
        return self.hc_mult * self.hidden_size

    @property
    def hc_mixes(self) -> int:
        """Rows of an `hc_*_fn` matrix: pre, post and the square mix."""
        return (2 + self.hc_mult) * self.hc_mult


@functools.cache
def _layer_plan(
    ratios: tuple[int, ...], kv_sources: tuple[int, ...], index_sources: tuple[int, ...], candidate_source: int
) -> tuple[LayerConfig, ...]:
    plan: list[LayerConfig] = []
    kv_source = index_source = None
    for layer_id, ratio in enumerate(ratios):
        owns_kv, owns_index = layer_id in kv_sources, layer_id in index_sources
        kv_source = layer_id if owns_kv else kv_source
        index_source = layer_id if owns_index else index_source
        mode = attention_mode(ratio, owns_kv, owns_index)
        if mode is None:
            raise ConfigError(f"compress_ratios[{layer_id}]", ratio,
                              "0 outside the source lists, 2 where a KV source is an index source and the other way "
                              "round, or 1 where a KV source is an index source")  # fmt: skip
        if ratio and (kv_source is None or index_source is None or ratios[kv_source] != ratio):
            raise ConfigError(f"compress_ratios[{layer_id}]", ratio, "a KV source of the same ratio at or before it")
        restricted = owns_index and not owns_kv and kv_source == candidate_source
        plan.append(
            LayerConfig(
                layer_id=layer_id,
                mode=mode,
                compress_ratio=ratio,
                kv_source=kv_source if ratio else None,
                index_source=index_source if ratio else None,
                candidate_source=candidate_source if restricted else None,
                makes_candidates=layer_id == candidate_source,
                rope_profile="compressed" if ratio else "swa",
            )
        )
    return tuple(plan)


def _check_consistency(c: ModelConfig) -> None:
    """The rules that join several fields, each with the field that a reader would correct first."""

    def require(condition: bool, field: str, rule: str) -> None:
        if not condition:
            raise ConfigError(field, getattr(c, field), rule)

    layers = c.num_hidden_layers
    require(len(c.compress_ratios) == layers, "compress_ratios", f"one entry for each of {layers} layers")
    require(set(c.compress_ratios) <= {0, 1, 2}, "compress_ratios", "entries 0, 1 or 2")
    for field in ("kv_source_layer_ids", "index_source_layer_ids"):
        ids = getattr(c, field)
        require(all(0 <= i < layers for i in ids), field, f"layer ids from 0 to {layers - 1}")
        require(list(ids) == sorted(set(ids)), field, "ascending layer ids without repetition")
    require(set(c.kv_source_layer_ids) <= set(c.index_source_layer_ids), "kv_source_layer_ids",
            "a subset of index_source_layer_ids")  # fmt: skip
    ratio_1_sources = [i for i in c.kv_source_layer_ids if c.compress_ratios[i] == 1]
    require(ratio_1_sources == [c.candidate_source_layer_id], "candidate_source_layer_id",
            f"the one KV source of ratio 1 (found {ratio_1_sources})")  # fmt: skip
    _layer_plan(c.compress_ratios, c.kv_source_layer_ids, c.index_source_layer_ids, c.candidate_source_layer_id)
    fewest = c.candidate_topk_blocks * c.candidate_block_size - (c.candidate_block_size - 1)
    require(fewest >= c.index_topk, "candidate_topk_blocks",
            f"blocks that always hold index_topk = {c.index_topk} visible entries (these hold {fewest})")  # fmt: skip

    require(c.num_attention_heads % c.o_groups == 0, "o_groups", f"a divisor of {c.num_attention_heads} heads")
    for field in ("hidden_size", "moe_intermediate_size", "head_dim", "q_lora_rank", "o_lora_rank", "index_head_dim"):
        require(getattr(c, field) % MX_GROUP == 0, field, f"a multiple of {MX_GROUP}")
    require(c.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", "an even number of channels")
    require(c.qk_rope_head_dim <= min(c.head_dim, c.index_head_dim), "qk_rope_head_dim",
            "at most head_dim and index_head_dim")  # fmt: skip
    require(c.num_experts_per_tok <= c.n_routed_experts, "num_experts_per_tok", "at most n_routed_experts")
    require(c.sliding_window <= c.max_position_embeddings, "sliding_window", "at most max_position_embeddings")
    for field in ("rope_theta", "compress_rope_theta"):
        require(getattr(c, field) > 1, field, "a base above 1")
    for field in ("bos_token_id", "eos_token_id", "pad_token_id"):
        require(0 <= getattr(c, field) < c.vocab_size, field, f"a token id below vocab_size = {c.vocab_size}")
    if c.image_token_id is not None:
        require(0 <= c.image_token_id < c.vocab_size, "image_token_id", f"a token id below vocab_size = {c.vocab_size}")
    if c.engram is not None:
        ids, rows = c.engram.layer_ids, c.engram.num_embeddings  # the file's keys below: groups are flat there
        if list(ids) != sorted(set(ids)) or not all(i < layers for i in ids):
            raise ConfigError("engram_layer_ids", ids, f"ascending layer ids from 0 to {layers - 1}")
        if len(ids) != len(rows):
            raise ConfigError("engram_num_embeddings", rows, "one entry per engram layer")
