"""Goldens and kernels meet the operator ABI: its operands go in, what it declares comes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from v41_config import TINY, OperatorError, ParallelLayout, find_operator, operators
from v41_config.operator_spec import BoundOperator, ConstantSpec
from v41_config.weight_table import WEIGHTS
from v41_goldens import compressor, indexer, linear, output_projection, qkv
from v41_goldens.candidate_blocks import candidate_blocks
from v41_goldens.experts import routed_experts, shared_expert
from v41_goldens.forward_context import DEFAULT_MAX_LOGITS_BYTES
from v41_goldens.gate import gate
from v41_goldens.greedy import greedy_tokens
from v41_goldens.hyper_connections import mhc_mixes, mhc_post, mhc_pre
from v41_goldens.moe import combine, moe
from v41_goldens.paged_cache import RowCache
from v41_goldens.quantisers import (
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
from v41_kernels.registry import OPERATORS as KERNEL_OPERATORS

Operands = Mapping[str, Tensor]
Results = dict[str, Tensor]
EXTENTS = {"T": 6, "B": 2, "G": 3, "R": 5, "LOGIT_ROWS": 2, "CAPACITY": 32, "ENTRIES": 21, "PAGES": 1, "N": 64, "K": 96,
           "WINDOW_BLOCKS": 2, "COMPRESSED_BLOCKS": 2, "STATE_BLOCKS": 2, "ATTENDED": 32}  # fmt: skip

CONSTANTS = {
    "query_start_loc": [0, 4, 6],
    "position_ids": [0, 1, 2, 3, 8, 9],
    "token_to_req_indices": [0, 0, 0, 0, 1, 1],
    "state_block_table": [[0], [1]],
    "compressor_source_token_indices": [1, 3, 5],
    "compressed_lens": [0, 1, 1, 2, 21, 21],
    "row_expert_ids": [0, 3, 3, 7, 1],
    "slots": [3, -1, 130, 7, 8, 9],
}
"""Integer operands that mean something; the others may be zero."""


def made(bound: BoundOperator) -> dict[str, Tensor]:
    """An operand of the declared shape and dtype for every tensor that is read."""
    torch.manual_seed(1)
    tensors = {}
    for name, tensor in bound.tensors.items():
        dtype = getattr(torch, tensor.spec.dtype)
        if tensor.spec.direction == "out":
            continue
        if name in CONSTANTS:
            value = torch.tensor(CONSTANTS[name], dtype=dtype)[: tensor.shape[0]]
            assert value.shape == tensor.shape, name
        elif dtype == torch.float8_e8m0fnu:
            value = torch.full(tensor.shape, 120, dtype=torch.uint8).view(dtype)
        elif dtype in (torch.int32, torch.int64, torch.bool):
            value = torch.zeros(tensor.shape, dtype=dtype)
        elif dtype in (torch.int8, torch.uint8):
            value = torch.randint(0, 100, tensor.shape, dtype=dtype)
        else:
            value = torch.randn(tensor.shape).to(dtype)
        tensors[name] = value
    return tensors


def fp8(t: Operands, name: str) -> Fp8Weight:
    return Fp8Weight(t[name], t[f"{name}_scale"])


def fp4(t: Operands, name: str, expert: int | None = None) -> Fp4Weight:
    packed, scale = t[name], t[f"{name}_scale"]
    return Fp4Weight(packed, scale) if expert is None else Fp4Weight(packed[expert], scale[expert])


def attention(t: Operands) -> AttentionWeights:
    """The weights among an operator's operands; the others are not there to be read."""
    given: dict[str, object] = {field.name: None for field in dataclasses.fields(AttentionWeights)}
    for name in given:
        if name in t:
            given[name] = fp8(t, name) if f"{name}_scale" in t else t[name]
    return AttentionWeights(**given)  # type: ignore[arg-type]


def rope(t: Operands, prefix: str = "") -> tuple[Tensor, Tensor]:
    return t[f"{prefix}rope_cos"], t[f"{prefix}rope_sin"]


def experts(t: Operands) -> dict[int, ExpertWeights]:
    return {e: ExpertWeights(*(fp4(t, name, e) for name in ("w1", "w2", "w3"))) for e in range(t["w1"].shape[0])}


def shared(t: Operands) -> ExpertWeights:
    return ExpertWeights(*(fp8(t, f"shared_{name}") for name in ("w1", "w2", "w3")))


def run_output_projection(t: Operands) -> Results:
    """`o_proj` counts output groups by the rows of `wo_a`, which are no operand of it."""
    groups = Fp8Weight(
        torch.zeros(t["wo_b"].shape[1], 32, dtype=torch.float8_e4m3fn),
        torch.zeros(t["wo_b"].shape[1] // 32, 1, dtype=torch.uint8).view(torch.float8_e8m0fnu),
    )
    weights = dataclasses.replace(attention(t), wo_a=groups)
    return {"output_partial": output_projection.o_proj(t["u"], weights, TINY)}


def run_pair_compressor(t: Operands) -> Results:
    rows = compressor.CompressorRows(
        closing=t["compressor_source_token_indices"].long(),
        request=t["token_to_req_indices"].long(),
        position=t["position_ids"].long(),
        starts=t["query_start_loc"].long(),
        state_block=t["state_block_table"][:, 0].long(),
    )
    weights = CompressorWeights(t["compressor_wkv"], t["compressor_norm"], t["compressor_wgate"])
    return {"latent": compressor.compress_ratio_2(t["x"], weights, rows, t["state_cache"], TINY)}


def run_index_queries(t: Operands) -> Results:
    weights = IndexerWeights(fp8(t, "index_wq_b"), t["index_weights_proj"])
    queries = indexer.index_queries(t["qr"], t["x"], weights, *rope(t), TINY)
    return {"index_q": queries.q, "index_weights": queries.weights}


def run_candidate_blocks(t: Operands) -> Results:
    chosen = candidate_blocks(t["scores"], t["compressed_lens"], TINY)
    return {"kept_blocks": chosen.kept, "block_scores": chosen.score}


def run_qkv(t: Operands) -> Results:
    weights = attention(t)
    qr = qkv.q_proj_qr(t["x"], weights, TINY)
    return {
        "qr": qr,
        "q": qkv.q_proj_rope(qr, weights, *rope(t), TINY),
        "kv": qkv.kv_proj_rope(t["x"], weights, *rope(t), TINY),
    }


def named(names: tuple[str, ...], values: tuple[Tensor, ...]) -> Results:
    return dict(zip(names, values, strict=True))


GOLDENS: dict[str, Callable[[Operands], Results]] = {
    "materialize_rope_rows": lambda t: named(
        ("rope_cos", "rope_sin"), materialize_rope_rows(t["freqs_cos"], t["freqs_sin"], t["position_ids"], 6)
    ),
    "rms_norm": lambda t: {"out": rms_norm(t["x"], t["weight"], 1e-20)},
    "quantized_linear": lambda t: {"out": linear.quantized_linear(t["x"], fp8(t, "w"))},
    "quantized_linear_fp4": lambda t: {"out": linear.quantized_linear(t["x"], fp4(t, "w"))},
    "quantized_linear_fp32": lambda t: {"out": linear.quantized_linear_fp32(t["x"], fp8(t, "w"))},
    "bf16_linear": lambda t: {"out": linear.bf16_linear(t["x"], t["w"])},
    "fp32_linear": lambda t: {"out": linear.fp32_linear(t["x"], t["w"])},
    "mhc_mixes": lambda t: named(
        ("pre", "post", "comb"),
        mhc_mixes(t["x_hc"], HyperConnectionWeights(t["fn"], t["base"], t["scale"]), TINY),
    ),
    "mhc_pre": lambda t: {"out": mhc_pre(t["x_hc"], t["pre_mix"])},
    "mhc_post": lambda t: {"out": mhc_post(t["y"], t["x_hc"], t["post"], t["comb"])},
    "hc_head": lambda t: {"out": mhc_pre(t["x_hc"], t["pre_mix"])},
    "q_proj_qr": lambda t: {"qr": qkv.q_proj_qr(t["x"], attention(t), TINY)},
    "q_proj_rope": lambda t: {"q": qkv.q_proj_rope(t["qr"], attention(t), *rope(t), TINY)},
    "kv_proj_rope": lambda t: {"kv": qkv.kv_proj_rope(t["x"], attention(t), *rope(t), TINY)},
    "qkv_proj_rope": run_qkv,
    "compress_ratio_1": lambda t: {
        "latent": compressor.compress_ratio_1(
            t["x"], CompressorWeights(t["compressor_wkv"], t["compressor_norm"], None), TINY
        )
    },
    "compress_ratio_2": run_pair_compressor,
    "index_keys": lambda t: {
        "keys": indexer.index_keys(
            t["latent"], IndexKeyWeights(t["index_wk"], t["index_k_norm"]), *rope(t, "compressed_"), TINY
        )
    },
    "index_queries": run_index_queries,
    "candidate_blocks": run_candidate_blocks,
    "sparse_attention": lambda t: {"o": sparse_attention(t["q"], t["kv"], t["valid"], t["attn_sink"], 0.125)},
    "grouped_output": lambda t: {"u": output_projection.grouped_output(t["o"], attention(t), *rope(t), TINY)},
    "o_proj": run_output_projection,
    "gate": lambda t: named(
        ("expert_ids", "route_weights", "biased_scores"), gate(t["x"], t["gate_weight"], t["gate_bias"], TINY)
    ),
    "routed_experts": lambda t: {
        "out": routed_experts(t["rows"], t["row_expert_ids"], t["row_route_weights"], experts(t), TINY)
    },
    "shared_expert": lambda t: {"out": shared_expert(t["x"], shared(t), TINY)},
    "combine": lambda t: {"out": combine(t["expert_rows"], t["expert_ids"], t["shared"])},
    "moe": lambda t: {
        "out": moe(t["x"], MoeWeights(t["gate_weight"], t["gate_bias"], shared(t), experts(t)), TINY)
    },
    "lm_head": lambda t: {"logits": linear.fp32_linear(t["normed"], t["head_weight"])},
    "greedy": lambda t: {"token_ids": greedy_tokens(t["logits"])},
}  # fmt: skip


def bound_to_tiny(name: str, layout: ParallelLayout | None = None) -> BoundOperator:
    spec = find_operator(name)
    return spec.bind(TINY, layout, **{symbol: EXTENTS[symbol] for symbol in spec.given})


@pytest.mark.parametrize("name", GOLDENS)
def test_the_golden_takes_and_returns_what_the_operator_declares(name: str) -> None:
    bound = bound_to_tiny(name)
    operands = made(bound)
    bound.check({**operands, **GOLDENS[name](operands)})


# Only operators whose golden reads more than operands (a context, a cache, a communicator) are judged elsewhere.
ELSEWHERE = ("prefill_", "decode_", "publish_", "hierarchical_", "dispatch", "return_to_source", "embed", "input_pack",
             "tp_logits_all_gather")  # fmt: skip


def test_no_operator_is_forgotten() -> None:
    assert {name for name in operators() if not name.startswith(ELSEWHERE)} == set(GOLDENS)


@pytest.mark.parametrize("name", ["q_proj_rope", "grouped_output"])
def test_the_golden_of_a_rank_returns_its_share(name: str) -> None:
    bound = bound_to_tiny(name, ParallelLayout(2))
    operands = made(bound)
    bound.check({**operands, **GOLDENS[name](operands)})
    with pytest.raises(OperatorError):
        bound_to_tiny(name).check({**operands, **GOLDENS[name](operands)})


@pytest.mark.parametrize(
    ("name", "cache", "rows", "quantize", "decode"),
    [
        ("publish_window_kv", "window_kv", "kv", quantize_window_kv, dequantize_window_kv),
        ("publish_compressed_kv", "compressed_kv", "kv", quantize_compressed_kv, dequantize_compressed_kv),
        ("publish_index_key", "index_key", "keys", quantize_index, dequantize_index),
    ],
)
def test_rows_are_published_into_caches_of_the_declared_form(
    name: str, cache: str, rows: str, quantize: Callable[..., object], decode: Callable[..., Tensor]
) -> None:
    operands = made(bound_to_tiny(name))
    pool = RowCache(operands[cache], operands[f"{cache}_scale"], decode)
    before = operands[cache].view(torch.uint8).clone()
    pool.publish(operands["slots"], quantize(operands[rows]))  # type: ignore[arg-type]
    written = (operands[cache].view(torch.uint8) != before).flatten(2).any(-1).nonzero().tolist()
    assert [1, 2] in written  # slot 130 is row 2 of block 1
    assert set(map(tuple, written)) <= {(0, 3), (1, 2), (0, 7), (0, 8), (0, 9)}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_goldens_read_weights_of_the_declared_form(tp: int) -> None:
    """From the table's names and shapes, for each layer's role and each rank's share."""
    for layer in TINY.layers:
        bound = bound_to_tiny(f"decode_attn_{layer.mode.value}", ParallelLayout(tp))
        tensors = {
            WEIGHTS[name].checkpoint.format(layer=layer.layer_id): tensor
            for name, tensor in made(bound).items()
            if name in WEIGHTS
        }
        weights = AttentionWeights.from_tensors(TINY, layer.layer_id, tensors)
        assert len(weights.attn_sink) == TINY.num_attention_heads // tp


@pytest.mark.parametrize("name", KERNEL_OPERATORS)
def test_a_kernel_has_the_contract_of_its_operator(name: str) -> None:
    assert KERNEL_OPERATORS[name].spec == find_operator(name)


def test_the_score_budget_has_one_default() -> None:
    (budget,) = (
        s for s in find_operator("hierarchical_sparse_indexer_c2a_full").scalars if isinstance(s, ConstantSpec)
    )
    assert budget.value == DEFAULT_MAX_LOGITS_BYTES
