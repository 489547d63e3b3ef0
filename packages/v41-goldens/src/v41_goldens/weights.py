"""Weights of the text model, as operators take them (model.md section 20).

Quantised matrices stay packed, see `quantized_weights`. The `from_tensors` constructors read global checkpoint names
and take shards as well: fewer heads, output groups, vocabulary rows or experts are just smaller tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from v41_config.model_config import MX_GROUP, ModelConfig
from v41_goldens.errors import WeightError
from v41_goldens.exact import dot_fp32
from v41_goldens.quantized_weights import Fp4Weight, Fp8Weight, expect_tensor


@dataclass(frozen=True, eq=False)
class HyperConnectionWeights:
    """One hyper-connection: FP32 `fn [M, HC*D]`, `base [M]`, `scale [3]`, M = (2 + HC) * HC (model.md section 5)."""

    fn: Tensor
    base: Tensor
    scale: Tensor

    @classmethod
    def from_tensors(cls, config: ModelConfig, prefix: str, tensors: Mapping[str, Tensor]) -> HyperConnectionWeights:
        """Read `{prefix}_fn`, `_base` and `_scale`, e.g. prefix `layers.3.hc_attn`."""
        mixes = config.hc_mixes
        return cls(
            fn=_take(tensors, f"{prefix}_fn", torch.float32, (mixes, config.hc_dim)),
            base=_take(tensors, f"{prefix}_base", torch.float32, (mixes,)),
            scale=_take(tensors, f"{prefix}_scale", torch.float32, (3,)),
        )

    def project(self, streams: Tensor) -> Tensor:
        """FP32 `[T, M]` of streams FP32 `[T, HC*D]`, by E1."""
        return dot_fp32(streams, self.fn)


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """One SwiGLU expert: w1 gate `[I, D]`, w3 up `[I, D]`, w2 down `[D, I]` (model.md section 14.2)."""

    w1: Fp8Weight | Fp4Weight
    w2: Fp8Weight | Fp4Weight
    w3: Fp8Weight | Fp4Weight


@dataclass(frozen=True, eq=False)
class MoeWeights:
    """Router, shared expert and the routed experts that are here, by global id (model.md section 14).

    `gate` is BF16 `[E, D]`, `gate_bias` FP32 `[E]`; a rank of an expert-parallel group holds all of both and a part
    of `experts`.
    """

    gate: Tensor
    gate_bias: Tensor
    shared: ExpertWeights
    experts: dict[int, ExpertWeights]

    @classmethod
    def from_tensors(cls, config: ModelConfig, layer_id: int, tensors: Mapping[str, Tensor]) -> MoeWeights:
        """Read `layers.{layer_id}.ffn.*`; takes the experts whose tensors are present."""
        prefix = f"layers.{layer_id}.ffn."
        d, i, e = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
        shared = prefix + "shared_experts."
        pattern = re.compile(re.escape(prefix) + r"experts\.(\d+)\.")
        present = sorted({int(match[1]) for name in tensors if (match := pattern.match(name))})
        if present and present[-1] >= e:
            raise WeightError(f"{prefix}experts", present[-1], f"expert ids below {e}")

        def expert(expert_id: int) -> ExpertWeights:
            p = f"{prefix}experts.{expert_id}."
            return ExpertWeights(
                w1=_take_fp4(tensors, p + "w1", (i, d)),
                w2=_take_fp4(tensors, p + "w2", (d, i)),
                w3=_take_fp4(tensors, p + "w3", (i, d)),
            )

        return cls(
            gate=_take(tensors, prefix + "gate.weight", torch.bfloat16, (e, d)),
            gate_bias=_take(tensors, prefix + "gate.bias", torch.float32, (e,)),
            shared=ExpertWeights(
                w1=_take_fp8(tensors, shared + "w1", (i, d)),
                w2=_take_fp8(tensors, shared + "w2", (d, i)),
                w3=_take_fp8(tensors, shared + "w3", (i, d)),
            ),
            experts={expert_id: expert(expert_id) for expert_id in present},
        )


@dataclass(frozen=True, eq=False)
class CompressorWeights:
    """Compressor of a KV source: BF16 `wkv [head_dim, D]`, `norm [head_dim]`, and for ratio 2 `wgate` like `wkv`
    (model.md section 9)."""

    wkv: Tensor
    norm: Tensor
    wgate: Tensor | None


@dataclass(frozen=True, eq=False)
class IndexKeyWeights:
    """Index keys of a KV source: BF16 `wk [index_head_dim, head_dim]` and `k_norm [index_head_dim]` (model.md
    section 10)."""

    wk: Tensor
    k_norm: Tensor


@dataclass(frozen=True, eq=False)
class IndexerWeights:
    """Index queries of an index source: `wq_b [index_n_heads * index_head_dim, q_lora_rank]`, BF16 `weights_proj
    [index_n_heads, D]` (model.md section 10)."""

    wq_b: Fp8Weight
    weights_proj: Tensor


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """Attention of one layer (model.md sections 8 to 13); the last three only where the layer's role has them.

    With H heads and G output groups here (all of them, or a tensor-parallel rank's): `wq_a [q_lora_rank, D]`,
    `wq_b [H * head_dim, q_lora_rank]`, `wkv [head_dim, D]`, `wo_a [G * o_lora_rank, heads per group * head_dim]`,
    `wo_b [D, G * o_lora_rank]`, `attn_sink` FP32 `[H]`.
    """

    wq_a: Fp8Weight
    q_norm: Tensor
    wq_b: Fp8Weight
    wkv: Fp8Weight
    kv_norm: Tensor
    wo_a: Fp8Weight
    wo_b: Fp8Weight
    attn_sink: Tensor
    compressor: CompressorWeights | None
    index_keys: IndexKeyWeights | None
    indexer: IndexerWeights | None

    @classmethod
    def from_tensors(cls, config: ModelConfig, layer_id: int, tensors: Mapping[str, Tensor]) -> AttentionWeights:
        """Read `layers.{layer_id}.attn.*`; the heads here are those of `attn_sink`, whole output groups of them."""
        prefix = f"layers.{layer_id}.attn."
        layer = config.layer_config(layer_id)
        c, d, hd = config, config.hidden_size, config.head_dim
        sink = _take(tensors, prefix + "attn_sink", torch.float32, None)
        heads, per_group = sink.shape[0], c.num_attention_heads // c.o_groups
        if sink.dim() != 1 or heads == 0 or heads % per_group or heads > c.num_attention_heads:
            raise WeightError(prefix + "attn_sink", tuple(sink.shape),
                              f"[heads], a multiple of the {per_group} heads of an output group")  # fmt: skip
        rank = heads // per_group * c.o_lora_rank

        def bf16(name: str, *shape: int) -> Tensor:
            return _take(tensors, prefix + name, torch.bfloat16, shape)

        return cls(
            wq_a=_take_fp8(tensors, prefix + "wq_a", (c.q_lora_rank, d)),
            q_norm=bf16("q_norm.weight", c.q_lora_rank),
            wq_b=_take_fp8(tensors, prefix + "wq_b", (heads * hd, c.q_lora_rank)),
            wkv=_take_fp8(tensors, prefix + "wkv", (hd, d)),
            kv_norm=bf16("kv_norm.weight", hd),
            wo_a=_take_fp8(tensors, prefix + "wo_a", (rank, per_group * hd)),
            wo_b=_take_fp8(tensors, prefix + "wo_b", (d, rank)),
            attn_sink=sink,
            compressor=CompressorWeights(
                wkv=bf16("compressor.wkv.weight", hd, d),
                norm=bf16("compressor.norm.weight", hd),
                wgate=bf16("compressor.wgate.weight", hd, d) if layer.compress_ratio == 2 else None,
            )
            if layer.owns_kv
            else None,
            index_keys=IndexKeyWeights(
                wk=bf16("indexer.wk.weight", c.index_head_dim, hd),
                k_norm=bf16("indexer.k_norm.weight", c.index_head_dim),
            )
            if layer.owns_kv
            else None,
            indexer=IndexerWeights(
                wq_b=_take_fp8(tensors, prefix + "indexer.wq_b", (c.index_n_heads * c.index_head_dim, c.q_lora_rank)),
                weights_proj=bf16("indexer.weights_proj.weight", c.index_n_heads, d),
            )
            if layer.owns_index
            else None,
        )


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One block: two norms BF16 `[D]`, attention, MoE and their hyper-connections (model.md sections 5, 6 and 20)."""

    attn_norm: Tensor
    ffn_norm: Tensor
    attention: AttentionWeights
    hc_attn: HyperConnectionWeights
    hc_ffn: HyperConnectionWeights
    moe: MoeWeights

    @classmethod
    def from_tensors(cls, config: ModelConfig, layer_id: int, tensors: Mapping[str, Tensor]) -> LayerWeights:
        """Read `layers.{layer_id}.*`.

        Raises:
            WeightError: naming the tensor that is missing or has another dtype or shape.
        """
        prefix, d = f"layers.{layer_id}.", config.hidden_size
        return cls(
            attn_norm=_take(tensors, prefix + "attn_norm.weight", torch.bfloat16, (d,)),
            ffn_norm=_take(tensors, prefix + "ffn_norm.weight", torch.bfloat16, (d,)),
            attention=AttentionWeights.from_tensors(config, layer_id, tensors),
            hc_attn=HyperConnectionWeights.from_tensors(config, prefix + "hc_attn", tensors),
            hc_ffn=HyperConnectionWeights.from_tensors(config, prefix + "hc_ffn", tensors),
            moe=MoeWeights.from_tensors(config, layer_id, tensors),
        )


@dataclass(frozen=True, eq=False)
class ModelWeights:
    """The whole text model: BF16 `embed [V, D]`, layers, `norm [D]`, `head [V, D]` (model.md sections 4, 15 and 20).

    A tensor-parallel rank holds a part of the V rows of `embed` and `head`.
    """

    embed: Tensor
    layers: Sequence[LayerWeights]
    norm: Tensor
    head: Tensor

    @classmethod
    def from_tensors(cls, config: ModelConfig, tensors: Mapping[str, Tensor]) -> ModelWeights:
        """Read every tensor that text inference needs; others in `tensors` are ignored.

        Raises:
            WeightError: naming the tensor that is missing or has another dtype or shape.
        """
        d = config.hidden_size

        def vocabulary(name: str) -> Tensor:
            tensor = _take(tensors, name, torch.bfloat16, None)
            if tensor.dim() != 2 or tensor.shape[1] != d or tensor.shape[0] > config.vocab_size:
                raise WeightError(name, tuple(tensor.shape), f"[at most {config.vocab_size}, {d}]")
            return tensor

        return cls(
            embed=vocabulary("embed.weight"),
            layers=tuple(LayerWeights.from_tensors(config, i, tensors) for i in range(config.num_hidden_layers)),
            norm=_take(tensors, "norm.weight", torch.bfloat16, (d,)),
            head=vocabulary("head.weight"),
        )


def _take_fp8(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, int]) -> Fp8Weight:
    n, k = shape
    return Fp8Weight(
        codes=_take(tensors, name + ".weight", torch.float8_e4m3fn, (n, k)),
        scale=_take(tensors, name + ".scale", torch.float8_e8m0fnu, (n // MX_GROUP, k // MX_GROUP)),
    )


def _take_fp4(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, int]) -> Fp4Weight:
    n, k = shape
    return Fp4Weight(
        packed=_take(tensors, name + ".weight", torch.int8, (n, k // 2)),
        scale=_take(tensors, name + ".scale", torch.float8_e8m0fnu, (n, k // MX_GROUP)),
    )


def _take(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype, shape: tuple[int, ...] | None) -> Tensor:
    """The tensor of that name, checked; a shape of None leaves the shape to the caller."""
    try:
        tensor = tensors[name]
    except KeyError:
        raise WeightError(name, None, "a tensor of this name") from None
    expect_tensor(tensor, dtype, shape, name)
    return tensor
