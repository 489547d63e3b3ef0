"""Goldens under the operators' names: operands in, what the contract declares out.

Each function takes the active rows of an operator's tensors by their contract's names and gives its `out` tensors;
`inout` tensors are changed in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from v41_config import ModelConfig
from v41_goldens import compressor, indexer, linear, output_projection, qkv
from v41_goldens.block import entry_streams
from v41_goldens.candidate_blocks import candidate_blocks
from v41_goldens.experts import routed_experts, shared_expert
from v41_goldens.gate import gate
from v41_goldens.greedy import greedy_tokens
from v41_goldens.hyper_connections import mhc_mixes, mhc_post, mhc_pre
from v41_goldens.moe import combine, moe
from v41_goldens.paged_cache import RowCache
from v41_goldens.quantisers import (
    Quantized,
    dequantize_compressed_kv,
    dequantize_index,
    dequantize_window_kv,
    quantize_compressed_kv,
    quantize_index,
    quantize_window_kv,
)
from v41_goldens.rms_norm import rms_norm
from v41_goldens.rope import materialize_rope_rows
from v41_goldens.sparse_attention import sparse_attention
from v41_goldens.weights import (
    AttentionWeights,
    CompressorWeights,
    ExpertWeights,
    Fp4Weight,
    Fp8Weight,
    HyperConnectionWeights,
    IndexerWeights,
    IndexKeyWeights,
    MoeWeights,
)

__all__ = ["GOLDENS"]

Operands = Mapping[str, Tensor]
Results = dict[str, Tensor]
Golden = Callable[[Operands, ModelConfig], Results]


def _fp8(t: Operands, name: str) -> Fp8Weight:
    return Fp8Weight(t[name], t[f"{name}_scale"])


def _attention(t: Operands) -> AttentionWeights:
    """The weights among an operator's operands; the others are not there to be read."""
    given: dict[str, object] = {field.name: None for field in dataclasses.fields(AttentionWeights)}
    for name in given:
        if name in t:
            given[name] = _fp8(t, name) if f"{name}_scale" in t else t[name]
    return AttentionWeights(**given)  # type: ignore[arg-type]


def _rope(t: Operands, prefix: str = "") -> tuple[Tensor, Tensor]:
    return t[f"{prefix}rope_cos"], t[f"{prefix}rope_sin"]


def _experts(t: Operands) -> dict[int, ExpertWeights]:
    def fp4(name: str, expert: int) -> Fp4Weight:
        return Fp4Weight(t[name][expert], t[f"{name}_scale"][expert])

    return {e: ExpertWeights(*(fp4(name, e) for name in ("w1", "w2", "w3"))) for e in range(t["w1"].shape[0])}


def _shared(t: Operands) -> ExpertWeights:
    return ExpertWeights(*(_fp8(t, f"shared_{name}") for name in ("w1", "w2", "w3")))


def _embed(t: Operands, config: ModelConfig) -> Results:
    del config
    row = t["token_ids"].long() - int(t["vocab_start"])
    inside = (row >= 0) & (row < len(t["embed_weight"]))
    rows = t["embed_weight"][torch.where(inside, row, 0)].float()
    return {"embedded_partial": torch.where(inside.unsqueeze(-1), rows, -0.0)}


def _mixes(t: Operands, config: ModelConfig) -> Results:
    weights = HyperConnectionWeights(t["fn"], t["base"], t["scale"])
    return dict(zip(("pre", "post", "comb"), mhc_mixes(t["x_hc"], weights, config), strict=True))


def _qkv(t: Operands, config: ModelConfig) -> Results:
    weights = _attention(t)
    qr = qkv.q_proj_qr(t["x"], weights, config)
    q = qkv.q_proj_rope(qr, weights, *_rope(t), config)
    return {"qr": qr, "q": q, "kv": qkv.kv_proj_rope(t["x"], weights, *_rope(t), config)}


def _compress_ratio_2(t: Operands, config: ModelConfig) -> Results:
    rows = compressor.CompressorRows(
        closing=t["compressor_source_token_indices"].long(),
        request=t["token_to_req_indices"].long(),
        position=t["position_ids"].long(),
        starts=t["query_start_loc"].long(),
        state_block=t["state_block_table"][:, 0].long(),
    )
    weights = CompressorWeights(t["compressor_wkv"], t["compressor_norm"], t["compressor_wgate"])
    return {"latent": compressor.compress_ratio_2(t["x"], weights, rows, t["state_cache"], config)}


def _index_queries(t: Operands, config: ModelConfig) -> Results:
    weights = IndexerWeights(_fp8(t, "index_wq_b"), t["index_weights_proj"])
    queries = indexer.index_queries(t["qr"], t["x"], weights, *_rope(t), config)
    return {"index_q": queries.q, "index_weights": queries.weights}


def _candidate_blocks(t: Operands, config: ModelConfig) -> Results:
    chosen = candidate_blocks(t["scores"], t["compressed_lens"], config)
    return {"kept_blocks": chosen.kept, "block_scores": chosen.score}


def _o_proj(t: Operands, config: ModelConfig) -> Results:
    del config
    return {"output_partial": linear.quantized_linear_fp32(t["u"], _fp8(t, "wo_b"))}


def _gate(t: Operands, config: ModelConfig) -> Results:
    routes = gate(t["x"], t["gate_weight"], t["gate_bias"], config)
    return {"expert_ids": routes.ids, "route_weights": routes.weights, "biased_scores": routes.biased_scores}


def _routed_experts(t: Operands, config: ModelConfig) -> Results:
    rows = t["rows"], t["row_expert_ids"], t["row_route_weights"]
    return {"out": routed_experts(*rows, _experts(t), config)}


def _moe(t: Operands, config: ModelConfig) -> Results:
    weights = MoeWeights(t["gate_weight"], t["gate_bias"], _shared(t), _experts(t))
    return {"out": moe(t["x"], weights, config)}


def _publish(
    cache: str, rows: str, quantize: Callable[[Tensor], Quantized], decode: Callable[[Quantized], Tensor]
) -> Golden:
    def publish(t: Operands, config: ModelConfig) -> Results:
        del config
        RowCache(t[cache], t[f"{cache}_scale"], decode).publish(t["slots"], quantize(t[rows]))
        return {}

    return publish


def _input_pack(t: Operands, config: ModelConfig) -> Results:
    return dict(zip(("x_hc", "pre_mix"), entry_streams(t["embedded"], config.hc_mult), strict=True))


GOLDENS: Mapping[str, Golden] = {
    "materialize_rope_rows": lambda t, _: dict(
        zip(
            ("rope_cos", "rope_sin"),
            materialize_rope_rows(t["freqs_cos"], t["freqs_sin"], t["position_ids"], len(t["position_ids"])),
            strict=True,
        )
    ),
    "embed": _embed,
    "input_pack": _input_pack,
    "greedy": lambda t, _: {"token_ids": greedy_tokens(t["logits"])},
    "lm_head": lambda t, _: {"logits": linear.fp32_linear(t["normed"], t["head_weight"])},
    "rms_norm": lambda t, config: {"out": rms_norm(t["x"], t["weight"], config.rms_norm_eps)},
    "quantized_linear": lambda t, _: {"out": linear.quantized_linear(t["x"], _fp8(t, "w"))},
    "quantized_linear_fp4": lambda t, _: {"out": linear.quantized_linear(t["x"], Fp4Weight(t["w"], t["w_scale"]))},
    "quantized_linear_fp32": lambda t, _: {"out": linear.quantized_linear_fp32(t["x"], _fp8(t, "w"))},
    "bf16_linear": lambda t, _: {"out": linear.bf16_linear(t["x"], t["w"])},
    "fp32_linear": lambda t, _: {"out": linear.fp32_linear(t["x"], t["w"])},
    "mhc_mixes": _mixes,
    "mhc_pre": lambda t, _: {"out": mhc_pre(t["x_hc"], t["pre_mix"])},
    "mhc_post": lambda t, _: {"out": mhc_post(t["y"], t["x_hc"], t["post"], t["comb"])},
    "hc_head": lambda t, _: {"out": mhc_pre(t["x_hc"], t["pre_mix"])},
    "q_proj_qr": lambda t, config: {"qr": qkv.q_proj_qr(t["x"], _attention(t), config)},
    "q_proj_rope": lambda t, config: {"q": qkv.q_proj_rope(t["qr"], _attention(t), *_rope(t), config)},
    "kv_proj_rope": lambda t, config: {"kv": qkv.kv_proj_rope(t["x"], _attention(t), *_rope(t), config)},
    "qkv_proj_rope": _qkv,
    "compress_ratio_1": lambda t, config: {
        "latent": compressor.compress_ratio_1(
            t["x"], CompressorWeights(t["compressor_wkv"], t["compressor_norm"], None), config
        )
    },
    "compress_ratio_2": _compress_ratio_2,
    "index_keys": lambda t, config: {
        "keys": indexer.index_keys(
            t["latent"], IndexKeyWeights(t["index_wk"], t["index_k_norm"]), *_rope(t, "compressed_"), config
        )
    },
    "publish_window_kv": _publish("window_kv", "kv", quantize_window_kv, dequantize_window_kv),
    "publish_compressed_kv": _publish("compressed_kv", "kv", quantize_compressed_kv, dequantize_compressed_kv),
    "publish_index_key": _publish("index_key", "keys", quantize_index, dequantize_index),
    "index_queries": _index_queries,
    "candidate_blocks": _candidate_blocks,
    "sparse_attention": lambda t, config: {
        "o": sparse_attention(t["q"], t["kv"], t["valid"], t["attn_sink"], config.head_dim**-0.5)
    },
    "grouped_output": lambda t, config: {
        "u": output_projection.grouped_output(t["o"], _attention(t), *_rope(t), config)
    },
    "o_proj": _o_proj,
    "gate": _gate,
    "routed_experts": _routed_experts,
    "shared_expert": lambda t, config: {"out": shared_expert(t["x"], _shared(t), config)},
    "combine": lambda t, _: {"out": combine(t["expert_rows"], t["expert_ids"], t["shared"])},
    "moe": _moe,
}
"""Operators whose golden needs nothing but their operands."""
