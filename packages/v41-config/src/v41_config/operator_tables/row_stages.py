"""Operators whose rows do not see one another: norm, linears, hyper-connections."""

from __future__ import annotations

from v41_config.operator_spec import OperatorSpec
from v41_config.operator_tables.operand import EPS, HC_CONSTANTS, NUM_TOKENS, reads, weights, writes

_FP8_WEIGHT = (reads("w", "float8_e4m3fn", "N", "K"), reads("w_scale", "float8_e8m0fnu", "N/MX", "K/MX"))
_FP4_WEIGHT = (reads("w", "int8", "N", "K/2"), reads("w_scale", "float8_e8m0fnu", "N", "K/MX"))
_X = reads("x", "bfloat16", "T", "K")

_LINEARS = (
    OperatorSpec(
        "quantized_linear",
        (_X, *_FP8_WEIGHT, writes("out", "bfloat16", "T", "N")),
        (NUM_TOKENS,),
        "FP8 activations, quantised here in groups of 32, times FP8 weights; one rounding to BF16 "
        "(model.md section 2.8).",
    ),
    OperatorSpec(
        "quantized_linear_fp4",
        (_X, *_FP4_WEIGHT, writes("out", "bfloat16", "T", "N")),
        (NUM_TOKENS,),
        "quantized_linear with packed FP4 weights (model.md section 2.8).",
    ),
    OperatorSpec(
        "quantized_linear_fp32",
        (_X, *_FP8_WEIGHT, writes("out", "float32", "T", "N")),
        (NUM_TOKENS,),
        "quantized_linear before its rounding: the partial of a row-parallel output (model.md section 18).",
    ),
    OperatorSpec(
        "bf16_linear",
        (_X, reads("w", "bfloat16", "N", "K"), writes("out", "bfloat16", "T", "N")),
        (NUM_TOKENS,),
        "Products of BF16, accumulated in FP32, one rounding to BF16 (model.md section 3).",
    ),
    OperatorSpec(
        "fp32_linear",
        (_X, reads("w", "bfloat16", "N", "K"), writes("out", "float32", "T", "N")),
        (NUM_TOKENS,),
        "Products of BF16, accumulated and left in FP32 (model.md section 3).",
    ),
)

_HYPER_CONNECTIONS = (
    OperatorSpec(
        "mhc_mixes",
        (
            reads("x_hc", "bfloat16", "T", "HC", "D"),
            *weights("hc_attn_fn", "hc_attn_base", "hc_attn_scale", rename="hc_attn_"),
            writes("pre", "float32", "T", "HC"),
            writes("post", "float32", "T", "HC"),
            writes("comb", "float32", "T", "HC", "HC"),
        ),
        (NUM_TOKENS, *HC_CONSTANTS),
        "Coefficients of a sublayer from its residual streams; pre belongs to the next sublayer (model.md section 5).",
    ),
    OperatorSpec(
        "mhc_pre",
        (
            reads("x_hc", "bfloat16", "T", "HC", "D"),
            reads("pre_mix", "float32", "T", "HC"),
            writes("out", "bfloat16", "T", "D"),
        ),
        (NUM_TOKENS,),
        "Collapse: the sum of the streams weighted by the incoming pre-mix, one rounding (model.md section 5).",
    ),
    OperatorSpec(
        "mhc_post",
        (
            reads("y", "bfloat16", "T", "D"),
            reads("x_hc", "bfloat16", "T", "HC", "D"),
            reads("post", "float32", "T", "HC"),
            reads("comb", "float32", "T", "HC", "HC"),
            writes("out", "bfloat16", "T", "HC", "D"),
        ),
        (NUM_TOKENS,),
        "Expand: out_k = post_k y + sum_j comb_jk x_j, one rounding (model.md section 5).",
    ),
    OperatorSpec(
        "hc_head",
        (
            reads("x_hc", "bfloat16", "T", "HC", "D"),
            reads("pre_mix", "float32", "T", "HC"),
            writes("out", "bfloat16", "T", "D"),
        ),
        (NUM_TOKENS,),
        "Final collapse: mhc_pre with the last layer's pre-mix; it has no weights of its own (model.md section 15).",
    ),
)

ROW_STAGES: tuple[OperatorSpec, ...] = (
    OperatorSpec(
        "rms_norm",
        (
            reads("x", "bfloat16", "T", "D"),
            reads("weight", "bfloat16", "D"),
            writes("out", "bfloat16", "T", "D"),
        ),
        (NUM_TOKENS, EPS),
        "x rsqrt(mean(x^2) + eps) weight in FP32, one rounding (model.md section 6).",
    ),
    *_LINEARS,
    *_HYPER_CONNECTIONS,
)
"""Norm, linears, hyper-connections."""
