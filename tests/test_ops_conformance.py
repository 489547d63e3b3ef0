"""Leaf operators against vectors computed by the released reference code, to the bit.

Each comparison has a counterpart that computes a plausible mistake and must be rejected by the same vectors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from v41_config import FLASH, TINY, RopeProfile
from v41_goldens import exact
from v41_goldens.experts import routed_experts, shared_expert, swiglu
from v41_goldens.gate import gate
from v41_goldens.hyper_connections import mhc_post, mhc_pre, mhc_split
from v41_goldens.judges import assert_equal_bits, unequal_bits
from v41_goldens.linear import quantized_linear
from v41_goldens.number_formats import e2m1_encode, e4m3_encode, e8m0_decode, pow2_ceil_e8m0
from v41_goldens.quantisers import (
    Quantized,
    dequantize_activation,
    dequantize_compressed_kv,
    dequantize_index,
    dequantize_window_kv,
    quantize_activation,
    quantize_compressed_kv,
    quantize_index,
    quantize_window_kv,
)
from v41_goldens.quantized_weights import Fp4Weight, Fp8Weight
from v41_goldens.rope import apply_rope, materialize_rope_rows, precompute_rope_tables, rope_frequencies
from v41_goldens.weights import ExpertWeights

CONFORMANCE = Path(__file__).parent / "conformance"


@functools.cache
def ops_vectors(name: str) -> dict[str, Tensor]:
    return load_file(CONFORMANCE / f"ops_{name}.safetensors")


def rejected(actual: Tensor, expected: Tensor) -> bool:
    """Whether the vectors tell a wrong result from the right one."""
    return actual.shape == expected.shape and bool(unequal_bits(actual, expected).any())


# Quantisers


def check_quantised(q: Quantized, payload: str, scale: str) -> None:
    v = ops_vectors("quantisers")
    assert_equal_bits(q.payload.view(torch.uint8), v[payload], payload)
    assert_equal_bits(q.scale.view(torch.uint8), v[scale], scale)


def test_activation_quantiser() -> None:
    v = ops_vectors("quantisers")
    q = quantize_activation(v["input"])
    check_quantised(q, "act_fp8_g32.codes", "act_fp8_g32.scale_e8m0")
    assert_equal_bits(dequantize_activation(q), v["act_fp8_g32.dequant_f32"], "dequantised")


def test_window_kv_quantiser() -> None:
    v = ops_vectors("quantisers")
    kv = dequantize_window_kv(quantize_window_kv(v["input"]))
    assert_equal_bits(kv, v["window_kv_fp8_g32.dequant_bf16"], "dequantised")


def test_compressed_kv_quantiser() -> None:
    v = ops_vectors("quantisers")
    q = quantize_compressed_kv(v["input"])
    check_quantised(q, "compressed_kv_fp4_g16.packed", "compressed_kv_fp4_g16.scale_e4m3")
    assert_equal_bits(dequantize_compressed_kv(q), v["compressed_kv_fp4_g16.dequant_bf16"], "dequantised")


def test_index_quantiser() -> None:
    v = ops_vectors("quantisers")
    q = quantize_index(v["input"])
    check_quantised(q, "index_fp4_g32.packed", "index_fp4_g32.scale_e8m0")
    assert_equal_bits(dequantize_index(q), v["index_fp4_g32.dequant_bf16"], "dequantised")


def test_each_row_of_the_quantisers_stands_for_something() -> None:
    with safe_open(CONFORMANCE / "ops_quantisers.safetensors", "pt") as file:
        names = file.metadata()["row_names"].split("|")
    assert len(names) == len(set(names)) == ops_vectors("quantisers")["input"].shape[0]


def test_wrong_quantiser_rules_are_rejected() -> None:
    v = ops_vectors("quantisers")
    x = v["input"].float()
    amax = x.abs().amax(-1)

    def fp8_scale(a: Tensor) -> Tensor:
        return pow2_ceil_e8m0(a).unsqueeze(-1)

    expected = v["act_fp8_g32.scale_e8m0"]
    assert_equal_bits(fp8_scale(amax.clamp_min(1e-4) * (1 / 448)), expected, "the rule itself")
    assert rejected(fp8_scale(amax * (1 / 448)), expected)  # no floor
    assert rejected(fp8_scale((amax / torch.tensor(448.0)).clamp_min(1e-4)), expected)  # floor after the division
    assert rejected((fp8_scale(amax.clamp_min(1e-4) * (1 / 448)) - 1).clamp_min(105), expected)  # floor, not ceiling
    assert rejected(fp8_scale((amax * 1.0001).clamp_min(1e-4) * (1 / 448)), expected)  # bumps exact powers of two

    scale = e8m0_decode(v["index_fp4_g32.scale_e8m0"])
    codes = x / scale
    assert_equal_bits(e2m1_encode(codes), v["index_fp4_g32.packed"], "the rule itself")
    assert rejected(e2m1_encode(codes * (1 - 2.0**-20)), v["index_fp4_g32.packed"])  # ties toward zero
    assert rejected(e2m1_encode(codes * (1 + 2.0**-20)), v["index_fp4_g32.packed"])  # ties away from zero
    assert rejected(e2m1_encode(codes + 0.0), v["index_fp4_g32.packed"])  # sign of zero lost
    packed = v["index_fp4_g32.packed"]
    assert rejected((packed >> 4) | (packed << 4), packed)  # even element in the high nibble

    groups = x.view(-1, 2, 16)
    scale = e4m3_encode(groups.abs().amax(-1).clamp_min(6 * 2.0**-9) / torch.tensor(6.0))
    assert_equal_bits(scale.view(torch.uint8), v["compressed_kv_fp4_g16.scale_e4m3"], "the rule itself")
    power_of_two = e4m3_encode(e8m0_decode(pow2_ceil_e8m0(groups.abs().amax(-1).clamp_min(6 * 2.0**-9) / 6)))
    assert rejected(power_of_two.view(torch.uint8), v["compressed_kv_fp4_g16.scale_e4m3"])


# Quantised linears


def test_fp8_and_fp4_linears() -> None:
    v = ops_vectors("gemm")
    assert_equal_bits(quantized_linear(v["x"], Fp8Weight(v["fp8.weight"], v["fp8.scale"])), v["fp8.y"], "fp8.y")
    fp4 = Fp4Weight(v["fp4.weight_packed_i8"], v["fp4.scale"])
    assert_equal_bits(quantized_linear(v["x"], fp4), v["fp4.y"], "fp4.y")


def test_wrong_linears_are_rejected() -> None:
    v = ops_vectors("gemm")
    fp8, fp4 = Fp8Weight(v["fp8.weight"], v["fp8.scale"]), Fp4Weight(v["fp4.weight_packed_i8"], v["fp4.scale"])
    assert rejected(exact.dot(v["x"], fp8.dequantize()).bfloat16(), v["fp8.y"])  # activation not quantised
    one_up = Fp8Weight(fp8.codes, fp8.scale.view(torch.uint8).add(1).view(torch.float8_e8m0fnu))
    assert rejected(quantized_linear(v["x"], one_up), v["fp8.y"])
    packed = fp4.packed.view(torch.uint8)
    swapped = Fp4Weight(((packed >> 4) | (packed << 4)).view(torch.int8), fp4.scale)
    assert rejected(quantized_linear(v["x"], swapped), v["fp4.y"])


# Hyper-connections

TIE = (16, 0, 21)
"""The element of `hc_post_out` whose stored value is not the sum by E3; see `test_expand`."""


def test_split_and_collapse() -> None:
    v = ops_vectors("hyper_connections")
    pre, post, comb = mhc_split(v["mixes"], v["scale"], v["base"], TINY)
    assert_equal_bits(pre, v["pre"], "pre")
    assert_equal_bits(post, v["post"], "post")
    assert_equal_bits(comb, v["comb"], "comb")
    assert_equal_bits(mhc_pre(v["hc_pre_x"], pre), v["hc_pre_y"], "hc_pre_y")
    assert (comb - v["comb_float64"]).abs().max() < 1e-5


def expand_with_fp32_sum(y: Tensor, x_hc: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`mhc_post`, but the four products are summed in FP32, in order of the source stream."""
    products = comb.unsqueeze(-1) * x_hc.float().unsqueeze(2)
    mixed = ((products[:, 0] + products[:, 1]) + products[:, 2]) + products[:, 3]
    return (post.unsqueeze(-1) * y.float().unsqueeze(1) + mixed).bfloat16()


def test_expand() -> None:
    """All elements but one, which lies on a tie and which this file alone takes from another sum.

    There post * y + E3(comb * X) is exactly half-way between two BF16 numbers. A plain FP32 sum of the four products
    falls below the tie and gives every element of this file; but the prefill files, 1.7 million elements, follow E3
    and contradict the FP32 sum (`test_expand_in_the_prefill_follows_e3`).
    """
    v = ops_vectors("hyper_connections")
    operands = (v["hc_post_branch"], v["hc_pre_x"], v["post"], v["comb"])
    expected = v["hc_post_out"]
    assert_equal_bits(expand_with_fp32_sum(*operands), expected, "FP32 sum")
    ours = mhc_post(*operands)
    assert unequal_bits(ours, expected).nonzero().tolist() == [list(TIE)]

    token, k, channel = TIE
    products = v["comb"][token, :, k] * v["hc_pre_x"][token, :, channel].float()
    sum_ = (v["post"][token, k] * v["hc_post_branch"][token, channel].float()) + exact.total(products, 0)
    midpoint = (ours[TIE].double() + expected[TIE].double()) / 2
    assert sum_.double() == midpoint
    assert int(ours[TIE].view(torch.int16)) % 2 == 0  # ties to even


def test_expand_in_the_prefill_follows_e3() -> None:
    with safe_open(CONFORMANCE / "prefill_097.safetensors", "pt") as prefill:
        plain_sum_differs = False
        x = prefill.get_tensor("embed_out").unsqueeze(1).expand(-1, TINY.hc_mult, -1)
        for layer in range(TINY.num_hidden_layers):
            p = f"layer.{layer:02d}."
            for branch, hc in (("attn_out", "hc_attn"), ("moe_out", "hc_ffn")):
                operands = [prefill.get_tensor(p + name) for name in (branch, hc + "_post", hc + "_comb")]
                by_e3 = mhc_post(operands[0], x, operands[1], operands[2])
                plain_sum_differs |= rejected(expand_with_fp32_sum(operands[0], x, operands[1], operands[2]), by_e3)
                x = by_e3
            assert_equal_bits(x, prefill.get_tensor(p + "X"), p + "X")
    assert plain_sum_differs


def test_wrong_hyper_connections_are_rejected() -> None:
    v = ops_vectors("hyper_connections")
    y, x, post, comb = v["hc_post_branch"], v["hc_pre_x"], v["post"], v["comb"]
    assert rejected(mhc_post(y, x, post, comb.transpose(1, 2)), v["hc_post_out"])
    assert rejected(mhc_pre(x, v["pre"].flip(1)), v["hc_pre_y"])
    for wrong in (
        TINY.model_copy(update={"hc_sinkhorn_iters": 19}),
        TINY.model_copy(update={"hc_sinkhorn_iters": 21}),
        TINY.model_copy(update={"hc_eps": 1e-5}),
    ):
        assert rejected(mhc_split(v["mixes"], v["scale"], v["base"], wrong)[2], v["comb"])
    swapped_scale = v["scale"][[1, 0, 2]]
    assert rejected(mhc_split(v["mixes"], swapped_scale, v["base"], TINY)[0], v["pre"])
    # Normalising columns before rows, as a softmax over the other index would.
    transposed = v["mixes"].clone()
    transposed[:, 8:] = transposed[:, 8:].unflatten(1, (4, 4)).transpose(1, 2).flatten(1)
    base = torch.cat([v["base"][:8], v["base"][8:].view(4, 4).T.flatten()])
    assert rejected(mhc_split(transposed, v["scale"], base, TINY)[2].transpose(1, 2).contiguous(), v["comb"])


# RoPE


@pytest.mark.parametrize("profile", ["swa", "compressed"])
def test_rope_tables(profile: RopeProfile) -> None:
    v = ops_vectors("rope")
    assert_equal_bits(rope_frequencies(FLASH, profile), v[f"{profile}.freqs"], "freqs")
    positions = v["positions"].int()
    tables = precompute_rope_tables(FLASH, profile, int(positions.max()) + 1)
    cos, sin = materialize_rope_rows(*tables, positions, positions.shape[0])
    assert_equal_bits(cos, v[f"{profile}.cos"], "cos")
    assert_equal_bits(sin, v[f"{profile}.sin"], "sin")


def test_rope_rotation() -> None:
    v = ops_vectors("rope")
    x, cos, sin = v["apply.x"], v["compressed.cos"], v["compressed.sin"]
    assert_equal_bits(apply_rope(x, cos, sin), v["apply.y"], "apply.y")
    assert_equal_bits(apply_rope(x, cos, sin, inverse=True), v["apply.y_inverse"], "apply.y_inverse")


def test_wrong_rope_is_rejected() -> None:
    v = ops_vectors("rope")
    x, cos, sin = v["apply.x"], v["compressed.cos"], v["compressed.sin"]
    assert rejected(apply_rope(x, v["swa.cos"], v["swa.sin"]), v["apply.y"])
    half = x.unflatten(-1, (2, 32)).transpose(-1, -2).flatten(-2)  # pairs (i, i + 32) instead of (2i, 2i + 1)
    rotated = apply_rope(half, cos, sin).unflatten(-1, (32, 2)).transpose(-1, -2).flatten(-2)
    assert rejected(rotated, v["apply.y"])
    assert rejected(apply_rope(x, cos.bfloat16().float(), sin.bfloat16().float()), v["apply.y"])
    angles = v["positions"].double().unsqueeze(-1) * v["compressed.freqs"].double()
    assert rejected(angles.cos().float(), v["compressed.cos"])  # angles in float64
    no_yarn = FLASH.model_copy(update={"rope_scaling": FLASH.rope_scaling.model_copy(update={"factor": 1})})
    assert rejected(rope_frequencies(no_yarn, "compressed"), v["compressed.freqs"])


# Gate and experts


def gate_operands() -> tuple[Tensor, Tensor, Tensor]:
    v = ops_vectors("gate_expert")
    return v["gate.x"], v["gate.weight"], v["gate.bias"]


def test_gate() -> None:
    v = ops_vectors("gate_expert")
    routes = gate(*gate_operands(), TINY)
    assert_equal_bits(routes.ids.long(), v["gate.ids"], "gate.ids")
    assert_equal_bits(routes.weights, v["gate.weights"], "gate.weights")
    assert_equal_bits(routes.biased_scores, v["gate.scores"] + v["gate.bias"], "gate.scores")


def test_wrong_gates_are_rejected() -> None:
    v = ops_vectors("gate_expert")
    x, weight, bias = gate_operands()
    assert rejected(gate(x, weight, torch.zeros_like(bias), TINY).ids.long(), v["gate.ids"])
    biased = v["gate.scores"] + v["gate.bias"]
    weights = biased.gather(1, v["gate.ids"])
    weights = weights / weights.sum(1, keepdim=True) * 1.5
    assert rejected(weights, v["gate.weights"])  # weights from the biased scores
    logits = exact.dot(x, weight)
    assert rejected(exact.sigmoid(logits), v["gate.scores"])  # another scoring function
    assert rejected((1 + logits.exp()).log().sqrt(), v["gate.scores"])  # softplus in FP32


def test_swiglu() -> None:
    v = ops_vectors("gate_expert")
    limit = TINY.swiglu_limit
    assert_equal_bits(swiglu(v["swiglu.gate"], v["swiglu.up"], limit), v["swiglu.z_f32"], "swiglu.z_f32")
    weighted = swiglu(v["swiglu.gate"], v["swiglu.up"], limit, v["swiglu.route_weight"])
    assert_equal_bits(weighted.bfloat16(), v["swiglu.weighted_bf16"], "swiglu.weighted_bf16")
    grid = swiglu(v["swiglu_grid.gate"], v["swiglu_grid.up"], limit)
    assert_equal_bits(grid, v["swiglu_grid.z_f32"], "swiglu_grid.z_f32")


def fp8_expert() -> ExpertWeights:
    v = ops_vectors("gate_expert")
    w1, w2, w3 = (Fp8Weight(v[f"expert_fp8.{w}.weight"], v[f"expert_fp8.{w}.scale"]) for w in ("w1", "w2", "w3"))
    return ExpertWeights(w1=w1, w2=w2, w3=w3)


def fp4_expert() -> ExpertWeights:
    v = ops_vectors("gate_expert")
    w1, w2, w3 = (
        Fp4Weight(v[f"expert_fp4.{w}.weight_packed_i8"], v[f"expert_fp4.{w}.scale"]) for w in ("w1", "w2", "w3")
    )
    return ExpertWeights(w1=w1, w2=w2, w3=w3)


def routed(expert: ExpertWeights, route_weights: Tensor) -> Tensor:
    x = ops_vectors("gate_expert")["gate.x"]
    ids = torch.full((x.shape[0],), 5, dtype=torch.int32)
    return routed_experts(x, ids, route_weights, {5: expert}, TINY)


def test_experts() -> None:
    v = ops_vectors("gate_expert")
    assert_equal_bits(shared_expert(v["gate.x"], fp8_expert(), TINY), v["expert_fp8.y"], "expert_fp8.y")
    weighted = routed(fp4_expert(), v["swiglu.route_weight"].squeeze(1))
    assert_equal_bits(weighted, v["expert_fp4.y_weighted"], "expert_fp4.y_weighted")


def swapped(expert: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(w1=expert.w3, w2=expert.w2, w3=expert.w1)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(
            lambda w: (routed(fp4_expert(), torch.ones_like(w)).float() * w.unsqueeze(1)).bfloat16(),
            id="weight after w2",
        ),
        pytest.param(lambda w: routed(swapped(fp4_expert()), w), id="gate and up swapped"),
    ],
)
def test_wrong_routed_experts_are_rejected(wrong: Callable[[Tensor], Tensor]) -> None:
    v = ops_vectors("gate_expert")
    assert rejected(wrong(v["swiglu.route_weight"].squeeze(1)), v["expert_fp4.y_weighted"])


def test_wrong_swiglu_is_rejected() -> None:
    v = ops_vectors("gate_expert")
    gate_, up = v["swiglu_grid.gate"], v["swiglu_grid.up"]
    assert rejected(swiglu(gate_, up, float("inf")), v["swiglu_grid.z_f32"])
    assert rejected(exact.silu(gate_.clamp(-10, 10)) * up.clamp(-10, 10), v["swiglu_grid.z_f32"])  # gate below, too
    assert rejected(exact.silu(gate_.clamp_max(10)) * up.clamp_max(10), v["swiglu_grid.z_f32"])  # up above only
    assert rejected(exact.silu(gate_).clamp_max(10) * up.clamp(-10, 10), v["swiglu_grid.z_f32"])  # clamp after silu
    weight = v["swiglu.route_weight"]
    early = (swiglu(v["swiglu.gate"], v["swiglu.up"], 10.0).bfloat16().float() * weight).bfloat16()
    assert rejected(early, v["swiglu.weighted_bf16"])  # rounded before the route weight
