"""Norm, linears and hyper-connections as calls."""

from __future__ import annotations

from v41_goldens import linear
from v41_goldens.hyper_connections import mhc_mixes, mhc_post, mhc_pre
from v41_goldens.operators.call import Call, Results
from v41_goldens.operators.golden import Golden, each_rank
from v41_goldens.rms_norm import rms_norm


def _rms_norm(c: Call) -> Results:
    return {"out": rms_norm(c["x"], c["weight"], float(c.scalars["eps"]))}


def _quantized_linear(c: Call) -> Results:
    return {"out": linear.quantized_linear(c["x"], c.fp8("w"))}


def _quantized_linear_fp4(c: Call) -> Results:
    return {"out": linear.quantized_linear(c["x"], c.fp4("w"))}


def _quantized_linear_fp32(c: Call) -> Results:
    return {"out": linear.quantized_linear_fp32(c["x"], c.fp8("w"))}


def _bf16_linear(c: Call) -> Results:
    return {"out": linear.bf16_linear(c["x"], c["w"])}


def _fp32_linear(c: Call) -> Results:
    return {"out": linear.fp32_linear(c["x"], c["w"])}


def _mhc_mixes(c: Call) -> Results:
    return dict(zip(("pre", "post", "comb"), mhc_mixes(c["x_hc"], c.hyper_connection(), c.config), strict=True))


def _mhc_pre(c: Call) -> Results:
    return {"out": mhc_pre(c["x_hc"], c["pre_mix"])}


def _mhc_post(c: Call) -> Results:
    return {"out": mhc_post(c["y"], c["x_hc"], c["post"], c["comb"])}


ROW_STAGES: tuple[Golden, ...] = (
    each_rank("rms_norm", rms_norm, _rms_norm),
    each_rank("quantized_linear", linear.quantized_linear, _quantized_linear),
    each_rank("quantized_linear_fp4", linear.quantized_linear, _quantized_linear_fp4),
    each_rank("quantized_linear_fp32", linear.quantized_linear_fp32, _quantized_linear_fp32),
    each_rank("bf16_linear", linear.bf16_linear, _bf16_linear),
    each_rank("fp32_linear", linear.fp32_linear, _fp32_linear),
    each_rank("mhc_mixes", mhc_mixes, _mhc_mixes),
    each_rank("mhc_pre", mhc_pre, _mhc_pre),
    each_rank("mhc_post", mhc_post, _mhc_post),
    each_rank("hc_head", mhc_pre, _mhc_pre),
)
"""In the order of the ABI."""
