"""Mixture of experts: route, send to the owners, compute, return, combine. None of them knows a TP rank."""

from __future__ import annotations

from v41_config.operator_spec import ConstantSpec, CountSpec, OperatorSpec
from v41_config.operator_tables.operand import NUM_TOKENS, SWIGLU_LIMIT, reads, weights, writes

_ROUTE_SCALE = ConstantSpec("routed_scaling_factor", "routed_scaling_factor")
_LOCAL_TOKENS = CountSpec("num_tokens", limit="T_local")
_SHARED = ("shared_w1", "shared_w3", "shared_w2")

EXPERT_STAGES: tuple[OperatorSpec, ...] = (
    OperatorSpec(
        "gate",
        (
            reads("x", "bfloat16", "T", "D"),
            *weights("gate_weight", "gate_bias"),
            writes("expert_ids", "int32", "T", "TOPK"),
            writes("route_weights", "float32", "T", "TOPK"),
            writes("biased_scores", "float32", "T", "E"),
        ),
        (NUM_TOKENS, _ROUTE_SCALE),
        "The experts of each token by biased score, descending, with weights of the unbiased scores "
        "(model.md section 14.1).",
    ),
    OperatorSpec(
        "dispatch",
        (
            reads("x", "bfloat16", "T_local", "D"),
            reads("expert_ids", "int32", "T_local", "TOPK"),
            reads("route_weights", "float32", "T_local", "TOPK"),
            writes("rows", "bfloat16", "R", "D"),
            writes("row_expert_ids", "int32", "R"),
            writes("row_route_weights", "float32", "R"),
            writes("assignment_order", "int64", "T_local*TOPK"),
            writes("send_counts", "int64", "EP"),
            writes("receive_counts", "int64", "EP"),
        ),
        (_LOCAL_TOKENS,),
        "A row for each assignment to the rank that owns its expert, ordered by source rank, with the expert's id in "
        "the model, as the gate gave it; padding is not sent (model.md section 14).",
    ),
    OperatorSpec(
        "routed_experts",
        (
            reads("rows", "bfloat16", "R", "D"),
            reads("row_expert_ids", "int32", "R"),
            reads("row_route_weights", "float32", "R"),
            *weights("w1", "w3", "w2"),
            writes("out", "bfloat16", "R", "D"),
        ),
        (CountSpec("num_rows", limit="R"), CountSpec("expert_start", limit="E", required=True), SWIGLU_LIMIT),
        "Each row through its expert; the route weight multiplies before the BF16 rounding and w2. row_expert_ids "
        "count all experts of the model, of which this rank's begin at expert_start; a negative id gives a row of "
        "zeros (model.md section 14.2).",
    ),
    OperatorSpec(
        "shared_expert",
        (reads("x", "bfloat16", "T", "D"), *weights(*_SHARED), writes("out", "bfloat16", "T", "D")),
        (NUM_TOKENS, SWIGLU_LIMIT),
        "The expert that every token takes, without route weight (model.md section 14.2).",
    ),
    OperatorSpec(
        "return_to_source",
        (
            reads("out", "bfloat16", "R", "D"),
            reads("assignment_order", "int64", "T_local*TOPK"),
            reads("send_counts", "int64", "EP"),
            reads("receive_counts", "int64", "EP"),
            writes("expert_rows", "bfloat16", "T_local", "TOPK", "D"),
        ),
        (_LOCAL_TOKENS,),
        "Dispatch backwards: every result at its token and choice again (model.md section 14).",
    ),
    OperatorSpec(
        "combine",
        (
            reads("expert_rows", "bfloat16", "T", "TOPK", "D"),
            reads("expert_ids", "int32", "T", "TOPK"),
            reads("shared", "bfloat16", "T", "D"),
            writes("out", "bfloat16", "T", "D"),
        ),
        (NUM_TOKENS,),
        "FP32 sum by ascending expert id, then the shared expert, one rounding (model.md section 14.3).",
    ),
    OperatorSpec(
        "moe",
        (
            reads("x", "bfloat16", "T_local", "D"),
            *weights("gate_weight", "gate_bias", "w1", "w3", "w2", *_SHARED),
            writes("out", "bfloat16", "T_local", "D"),
        ),
        (_LOCAL_TOKENS, ConstantSpec("num_experts_per_tok", "num_experts_per_tok"), _ROUTE_SCALE, SWIGLU_LIMIT),
        "All of it for this rank's rows; a rank without rows takes part in the exchanges (model.md section 14).",
    ),
)
"""Stages in the order of the MoE sublayer, then the whole."""
