"""Calls of the operators table in the terms of the ABI: operands by the contract's names.

Each function here has the signature of the golden that it stands for and gives the contract's operands; what a golden
returns are the contract's ``out`` tensors in their order. :data:`CALLS` is the list of operators that can be exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from v41_config import LayerConfig, ModelConfig, OperatorError
from v41_goldens.compressor import CompressorRows
from v41_goldens.forward_context import ForwardContext
from v41_goldens.greedy import greedy_tokens
from v41_goldens.paged_cache import RowCache
from v41_goldens.weights import (
    AttentionWeights,
    CompressorWeights,
    ExpertWeights,
    HyperConnectionWeights,
    IndexerWeights,
    IndexKeyWeights,
    MoeWeights,
)
from v41_model.attention_calls import ATTENTION_CALLS
from v41_model.expert_parallel import ExpertParallelOutput, expert_parallel_moe
from v41_model.linear_calls import LINEAR_CALLS
from v41_model.operator_call import (
    Arguments,
    OperatorCalls,
    compressor_weights,
    index_key_weights,
    packed_weight,
    pool,
    rope_rows,
)

__all__ = ["CALLS"]


def _embed(token_ids: Tensor, table: Tensor, vocab_start: int, _: int) -> Arguments:
    return {"token_ids": token_ids, "embed_weight": table, "vocab_start": vocab_start}


def _input_pack(embedded: Tensor, _: int) -> Arguments:
    return {"embedded": embedded}


def _materialize_rope_rows(cos: Tensor, sin: Tensor, position_ids: Tensor, num_tokens: int) -> Arguments:
    return {"freqs_cos": cos, "freqs_sin": sin, "position_ids": position_ids, "num_tokens": num_tokens}


def _rms_norm(x: Tensor, weight: Tensor, _: float) -> Arguments:
    return {"x": x, "weight": weight}


def _lm_head(normed: Tensor, head: Tensor) -> Arguments:
    return {"normed": normed, "head_weight": head}


def _greedy(logits: Tensor) -> Arguments:
    return {"logits": logits}


def _mhc_mixes(x_hc: Tensor, weights: HyperConnectionWeights, _: ModelConfig) -> Arguments:
    return {"x_hc": x_hc, "fn": weights.fn, "base": weights.base, "scale": weights.scale}


def _mhc_pre(x_hc: Tensor, pre_mix: Tensor) -> Arguments:
    return {"x_hc": x_hc, "pre_mix": pre_mix}


def _mhc_post(y: Tensor, x_hc: Tensor, post: Tensor, comb: Tensor) -> Arguments:
    return {"y": y, "x_hc": x_hc, "post": post, "comb": comb}


def _q_proj_qr(x: Tensor, weights: AttentionWeights, _: ModelConfig) -> Arguments:
    return {"x": x, **packed_weight("wq_a", weights.wq_a), "q_norm": weights.q_norm}


def _q_proj_rope(qr: Tensor, weights: AttentionWeights, cos: Tensor, sin: Tensor, _: ModelConfig) -> Arguments:
    return {"qr": qr, **packed_weight("wq_b", weights.wq_b), **rope_rows(cos, sin)}


def _kv_proj_rope(x: Tensor, weights: AttentionWeights, cos: Tensor, sin: Tensor, _: ModelConfig) -> Arguments:
    return {"x": x, **packed_weight("wkv", weights.wkv), "kv_norm": weights.kv_norm, **rope_rows(cos, sin)}


def _qkv_proj_rope(ctx: ForwardContext, layer: LayerConfig, weights: AttentionWeights, x: Tensor) -> Arguments:
    return {
        **_q_proj_qr(x, weights, ctx.config),
        **packed_weight("wq_b", weights.wq_b),
        **_kv_proj_rope(x, weights, *ctx.query_rope(layer), ctx.config),
    }


def _compress_ratio_1(x: Tensor, weights: CompressorWeights, _: ModelConfig) -> Arguments:
    return {"x": x, **compressor_weights(weights)}


def _compress_ratio_2(
    x: Tensor, weights: CompressorWeights, rows: CompressorRows, state: Tensor, _: ModelConfig
) -> Arguments:
    return {
        "x": x,
        **compressor_weights(weights),
        "query_start_loc": rows.starts.int(),
        "position_ids": rows.position.int(),
        "token_to_req_indices": rows.request.int(),
        "state_block_table": rows.state_block.int().unsqueeze(-1),
        "state_cache": state,
        "compressor_source_token_indices": rows.closing.int(),
    }


def _index_keys(latent: Tensor, weights: IndexKeyWeights, cos: Tensor, sin: Tensor, _: ModelConfig) -> Arguments:
    return {"latent": latent, **index_key_weights(weights), **rope_rows(cos, sin, "compressed_")}


def _published(rows: str, name: str) -> Callable[..., Arguments]:
    def arguments(cache: RowCache, slots: Tensor, values: Tensor) -> Arguments:
        return {rows: values, "slots": slots, **pool(name, cache)}

    return arguments


def _index_queries(
    qr: Tensor, x: Tensor, weights: IndexerWeights, cos: Tensor, sin: Tensor, _: ModelConfig
) -> Arguments:
    projections = {**packed_weight("index_wq_b", weights.wq_b), "index_weights_proj": weights.weights_proj}
    return {"qr": qr, "x": x, **projections, **rope_rows(cos, sin)}


def _candidate_blocks(scores: Tensor, visible: Tensor, config: ModelConfig) -> Arguments:
    scalars = {
        "candidate_block_size": config.candidate_block_size,
        "candidate_topk_blocks": config.candidate_topk_blocks,
    }
    return {"scores": scores, "compressed_lens": visible.int().flatten(), **scalars}


def _sparse_attention(q: Tensor, kv: Tensor, valid: Tensor, sink: Tensor, _: float) -> Arguments:
    return {"q": q, "kv": kv, "valid": valid, "attn_sink": sink}


def _grouped_output(o: Tensor, weights: AttentionWeights, cos: Tensor, sin: Tensor, _: ModelConfig) -> Arguments:
    return {"o": o, **packed_weight("wo_a", weights.wo_a), **rope_rows(cos, sin)}


def _o_proj(u: Tensor, weights: AttentionWeights, _config: ModelConfig, _parts: int = 1) -> Arguments:
    return {"u": u, **packed_weight("wo_b", weights.wo_b)}


def _gate(x: Tensor, weight: Tensor, bias: Tensor, _: ModelConfig) -> Arguments:
    return {"x": x, "gate_weight": weight, "gate_bias": bias}


def _routed_experts(
    rows: Tensor, ids: Tensor, route_weights: Tensor, experts: Mapping[int, ExpertWeights], _: ModelConfig
) -> Arguments:
    """Ids as they were sent."""
    operands: Arguments = {"rows": rows, "row_expert_ids": ids, "row_route_weights": route_weights}
    return {**operands, **_expert_weights(experts), "expert_start": min(experts)}


def _expert_weights(experts: Mapping[int, ExpertWeights]) -> Arguments:
    """Weights of the experts held here, neighbours, on top of each other."""
    held, operands = sorted(experts), Arguments()
    if held != list(range(held[0], held[0] + len(held))):
        raise OperatorError("routed_experts: experts", held, "ids that follow one another")
    for name in ("w1", "w3", "w2"):
        parts = [packed_weight(name, getattr(experts[expert], name)) for expert in held]
        for key in (name, f"{name}_scale"):
            stacked = torch.stack([part[key].view(torch.uint8) for part in parts])
            operands[key] = stacked.view(parts[0][key].dtype)
    return operands


def _moe(x: Tensor, weights: MoeWeights, _owners: Tensor, config: ModelConfig, *_: object) -> Arguments:
    """Where one rank owns every expert."""
    gate = {"gate_weight": weights.gate, "gate_bias": weights.gate_bias}
    return {**_shared_expert(x, weights.shared, config), **gate, **_expert_weights(weights.experts)}


def _moe_out(_given: tuple[Any, ...], result: ExpertParallelOutput) -> tuple[Tensor, ...]:
    return (result.out,)


def _moe_restored(
    _given: tuple[Any, ...], result: ExpertParallelOutput, values: Sequence[Tensor]
) -> ExpertParallelOutput:
    """With the golden's routes, which the operator does not tell."""
    return replace(result, out=values[0])


def _shared_expert(x: Tensor, weights: ExpertWeights, _: ModelConfig) -> Arguments:
    operands: Arguments = {"x": x}
    for name in ("w1", "w3", "w2"):
        operands |= packed_weight(f"shared_{name}", getattr(weights, name))
    return operands


def _combine(expert_rows: Tensor, expert_ids: Tensor, shared: Tensor) -> Arguments:
    return {"expert_rows": expert_rows, "expert_ids": expert_ids, "shared": shared}


_OWN_NAMES: dict[str, Callable[..., Arguments]] = {
    "embed": _embed,
    "input_pack": _input_pack,
    "materialize_rope_rows": _materialize_rope_rows,
    "rms_norm": _rms_norm,
    "mhc_mixes": _mhc_mixes,
    "mhc_pre": _mhc_pre,
    "mhc_post": _mhc_post,
    "hc_head": _mhc_pre,
    "q_proj_qr": _q_proj_qr,
    "q_proj_rope": _q_proj_rope,
    "kv_proj_rope": _kv_proj_rope,
    "compress_ratio_1": _compress_ratio_1,
    "compress_ratio_2": _compress_ratio_2,
    "index_keys": _index_keys,
    "publish_window_kv": _published("kv", "window_kv"),
    "publish_compressed_kv": _published("kv", "compressed_kv"),
    "publish_index_key": _published("keys", "index_key"),
    "index_queries": _index_queries,
    "candidate_blocks": _candidate_blocks,
    "sparse_attention": _sparse_attention,
    "grouped_output": _grouped_output,
    "o_proj": _o_proj,
    "gate": _gate,
    "routed_experts": _routed_experts,
    "shared_expert": _shared_expert,
    "combine": _combine,
}

CALLS: dict[str, OperatorCalls] = {
    **{name: OperatorCalls(name, name, arguments) for name, arguments in _OWN_NAMES.items()},
    "lm_head": OperatorCalls("lm_head", "fp32_linear", _lm_head),
    "greedy": OperatorCalls("greedy", greedy_tokens.__name__, _greedy),
    **LINEAR_CALLS,
    "qkv_proj_rope": OperatorCalls("qkv_proj_rope", "qkv_proj_rope", _qkv_proj_rope, composed=True),
    "moe": OperatorCalls(
        "moe", expert_parallel_moe.__name__, _moe, outputs=_moe_out, restored=_moe_restored, composed=True, joins="EP"
    ),
    **ATTENTION_CALLS,
}
"""By the ABI's name."""
