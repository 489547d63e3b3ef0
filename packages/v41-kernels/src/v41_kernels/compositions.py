"""Operators that are several launches: attention entries, half layers and the MoE sublayer of one rank.

A composition gets the active rows of an operator's tensors by the contract's names and launches kernels on them. What
passes between two launches is a tensor in memory; nothing is computed here. Operators that join other ranks are run
for a group of one: a slab is all rows, and the sum over ranks is the rank's own partial.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from v41_config import AttentionMode


@dataclass(frozen=True)
class Call:
    """One call of a composition: how to launch a kernel, the operands' active rows, and the constants."""

    launch: Callable[..., None]
    tensors: Mapping[str, Tensor]
    constants: Mapping[str, float]

    def operands(self, *names: str) -> dict[str, Tensor]:
        """Operands by name, each quantised one with its scale."""
        wanted = [name for operand in names for name in (operand, f"{operand}_scale")]
        return {name: self.tensors[name] for name in wanted if name in self.tensors}

    def given(self, *names: str) -> dict[str, float]:
        """Constants by name."""
        return {name: self.constants[name] for name in names}

    def empty(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """A tensor between two launches; zeros, so that rows that no launch writes are the same in every run."""
        return torch.zeros(shape, dtype=dtype)


Composition = Callable[[Call], None]
_ROPE = ("rope_cos", "rope_sin")


def qkv_proj_rope(call: Call) -> None:
    """`q_proj_qr`, `q_proj_rope` and `kv_proj_rope` of one input."""
    eps = call.given("eps")
    call.launch("q_proj_qr", **call.operands("x", "wq_a", "q_norm", "qr"), **eps)
    call.launch("q_proj_rope", **call.operands("qr", "wq_b", *_ROPE, "q"))
    call.launch("kv_proj_rope", **call.operands("x", "wkv", "kv_norm", *_ROPE, "kv"), **eps)


def attention(call: Call, mode: AttentionMode) -> None:
    """An attention entry: project, publish, select where the mode does, attend, project back."""
    t = call.tensors
    tokens, heads, head_dim = len(t["x"]), len(t["attn_sink"]), t["wkv"].shape[0]
    projected = {
        "qr": call.empty(torch.bfloat16, tokens, t["wq_a"].shape[0]),
        "q": call.empty(torch.bfloat16, tokens, heads, head_dim),
        "kv": call.empty(torch.bfloat16, tokens, head_dim),
    }
    qkv_proj_rope(Call(call.launch, {**t, **projected}, call.constants))
    call.launch("publish_window_kv", kv=projected["kv"], slots=t["window_slots"], **call.operands("window_kv"))
    if mode in (AttentionMode.C2A_FULL, AttentionMode.C1A_FULL):
        _publish_compressed(call, tokens, head_dim)
    if "index_wq_b" in t:
        _select(call, mode, projected["qr"])
    o = call.empty(torch.bfloat16, tokens, heads, head_dim)
    attended = dict(q=projected["q"], **call.operands("window_kv", "window_indices", "attn_sink"), o=o)
    if mode is AttentionMode.SWA:
        call.launch("window_attention", **attended)
    else:
        call.launch("selected_attention", **attended, **call.operands("compressed_kv", "topk_rows"))
    u = call.empty(torch.bfloat16, tokens, t["wo_a"].shape[0])
    call.launch("grouped_output", o=o, **call.operands("wo_a", *_ROPE), u=u)
    call.launch("o_proj", u=u, **call.operands("wo_b", "output_partial"))


def _publish_compressed(call: Call, tokens: int, head_dim: int) -> None:
    """Latents, their index keys and their rotated KV; tokens that close no group have slots of -1."""
    t, eps = call.tensors, call.given("eps")
    rotation = call.operands("compressed_rope_cos", "compressed_rope_sin")
    latent = call.empty(torch.bfloat16, tokens, head_dim)
    weights = call.operands("x", "compressor_wkv", "compressor_norm")
    if "compressor_wgate" in t:
        names = ("compressor_wgate", "query_start_loc", "position_ids", "token_to_req_indices", "state_block_table")
        call.launch("compress_pairs", **weights, **call.operands(*names, "state_cache"), latent=latent, **eps)
    else:
        call.launch("compress_ratio_1", **weights, latent=latent, **eps)
    keys = call.empty(torch.bfloat16, tokens, t["index_wk"].shape[0])
    call.launch("index_keys", latent=latent, **call.operands("index_wk", "index_k_norm"), **rotation, keys=keys, **eps)
    call.launch("publish_index_key", keys=keys, slots=t["index_slots"], **call.operands("index_key"))
    kv = call.empty(torch.bfloat16, tokens, head_dim)
    call.launch("rotate_rows", latent=latent, **rotation, kv=kv)
    call.launch("publish_compressed_kv", kv=kv, slots=t["compressed_slots"], **call.operands("compressed_kv"))


def _select(call: Call, mode: AttentionMode, qr: Tensor) -> None:
    t = call.tensors
    heads, tokens = t["index_weights_proj"].shape[0], len(qr)
    queries = {
        "index_q": call.empty(torch.bfloat16, tokens, heads, t["index_wq_b"].shape[0] // heads),
        "index_weights": call.empty(torch.bfloat16, tokens, heads),
    }
    call.launch("index_queries", qr=qr, **call.operands("x", "index_wq_b", "index_weights_proj", *_ROPE), **queries)
    read = ("index_key", "compressed_block_table", "compressed_lens", "token_to_req_indices", "kept_blocks")
    candidates = ("candidate_block_size", "candidate_topk_blocks")
    constants = {name: call.constants[name] for name in ("max_logits_bytes", *candidates) if name in call.constants}
    name = f"hierarchical_sparse_indexer_{mode.value}"
    call.launch(name, **queries, **call.operands(*read, "topk_rows"), **constants)


def half_layer(call: Call, mode: AttentionMode) -> None:
    """An attention entry between hyper-connections."""
    t = call.tensors
    tokens, hc, width = t["x_hc"].shape
    eps = call.given("eps")
    mixes = {
        "post": call.empty(torch.float32, tokens, hc),
        "comb": call.empty(torch.float32, tokens, hc, hc),
    }
    connection = {"fn": t["hc_attn_fn"], "base": t["hc_attn_base"], "scale": t["hc_attn_scale"]}
    iterations = call.given("eps", "hc_eps", "hc_sinkhorn_iters")
    call.launch("mhc_mixes", x_hc=t["x_hc"], **connection, pre=t["next_pre_mix"], **mixes, **iterations)
    collapsed = call.empty(torch.bfloat16, tokens, width)
    call.launch("mhc_pre", x_hc=t["x_hc"], pre_mix=t["incoming_pre_mix"], out=collapsed)
    call.launch("rms_norm", x=collapsed, weight=t["attn_norm"], out=t["attn_input"], **eps)
    output_partial = call.empty(torch.float32, tokens, width)
    inner = {**t, "x": t["attn_input"], "output_partial": output_partial}
    attention(Call(call.launch, inner, call.constants), mode)
    call.launch("output_rounding", output_partial=output_partial, attn_output=t["attn_output"])
    call.launch("mhc_post", y=t["attn_output"], x_hc=t["x_hc"], **mixes, out=t["x_hc_out"])


def moe(call: Call) -> None:
    """Gate, experts and combination for a rank that owns every expert."""
    t = call.tensors
    (tokens, width), experts = t["x"].shape, t["gate_weight"].shape[0]
    choices = int(call.constants["num_experts_per_tok"])
    routes = {
        "expert_ids": call.empty(torch.int32, tokens, choices),
        "route_weights": call.empty(torch.float32, tokens, choices),
    }
    scores = call.empty(torch.float32, tokens, experts)
    scale, limit = call.given("routed_scaling_factor"), call.given("swiglu_limit")
    call.launch("gate", **call.operands("x", "gate_weight", "gate_bias"), **routes, biased_scores=scores, **scale)
    rows = call.empty(torch.bfloat16, tokens, choices, width)
    call.launch("routed_rows", x=t["x"], rows=rows)
    expert_rows = call.empty(torch.bfloat16, tokens, choices, width)
    call.launch(
        "routed_experts",
        rows=rows.view(-1, width),
        row_expert_ids=routes["expert_ids"].view(-1),
        row_route_weights=routes["route_weights"].view(-1),
        **call.operands("w1", "w3", "w2"),
        expert_start=0,
        out=expert_rows.view(-1, width),
        **limit,
    )
    shared = call.empty(torch.bfloat16, tokens, width)
    call.launch("shared_expert", **call.operands("x", "shared_w1", "shared_w3", "shared_w2"), out=shared, **limit)
    call.launch("combine", expert_rows=expert_rows, expert_ids=routes["expert_ids"], shared=shared, out=t["out"])


def _entries() -> dict[str, Composition]:
    entries: dict[str, Composition] = {}
    for phase in ("prefill", "decode"):
        for mode in AttentionMode:
            entries[f"{phase}_attn_{mode.value}"] = partial(attention, mode=mode)
            entries[f"{phase}_{mode.value}"] = partial(half_layer, mode=mode)
            entries[f"{phase}_{mode.value}_sharded"] = partial(half_layer, mode=mode)
    return entries


COMPOSITIONS: Mapping[str, Composition] = {"qkv_proj_rope": qkv_proj_rope, "moe": moe, **_entries()}
"""The operators that are compositions, by name."""
