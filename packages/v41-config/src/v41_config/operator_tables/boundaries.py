"""Where the model begins and ends, and where rows cross the TP group."""

from __future__ import annotations

from v41_config.operator_spec import CountSpec, OperatorSpec
from v41_config.operator_tables.operand import NUM_TOKENS, reads, weights, writes

_NUM_LOGIT_ROWS = CountSpec("num_rows", limit="LOGIT_ROWS")

_ENTRY = (
    OperatorSpec(
        "materialize_rope_rows",
        (
            reads("freqs_cos", "float32", "CAPACITY", "HALF_ROPE"),
            reads("freqs_sin", "float32", "CAPACITY", "HALF_ROPE"),
            reads("position_ids", "int32", "T"),
            writes("rope_cos", "float32", "T", "HALF_ROPE"),
            writes("rope_sin", "float32", "T", "HALF_ROPE"),
        ),
        (NUM_TOKENS,),
        "Rows of one profile's tables at position_ids; a negative position gives cos 1, sin 0 (model.md section 7).",
    ),
    OperatorSpec(
        "embed",
        (
            reads("token_ids", "int32", "T"),
            *weights("embed_weight"),
            writes("embedded_partial", "float32", "T", "D"),
        ),
        (NUM_TOKENS, CountSpec("vocab_start", limit="V", required=True)),
        "Rows of this rank's vocabulary range, which begins at vocab_start; -0 for the ids of other ranks, so that "
        "the sum over the group leaves every stored bit as it is (model.md section 4).",
    ),
    OperatorSpec(
        "input_pack",
        (
            reads("embedded", "bfloat16", "T_local", "D"),
            writes("x_hc", "bfloat16", "T_local", "HC", "D"),
            writes("pre_mix", "float32", "T_local", "HC"),
        ),
        (CountSpec("num_tokens", limit="T_local"),),
        "The embedding in every lane, and a pre-mix of lane zero alone (model.md section 4).",
    ),
)

_EXIT = (
    OperatorSpec(
        "lm_head",
        (
            reads("normed", "bfloat16", "LOGIT_ROWS", "D"),
            *weights("head_weight"),
            writes("logits", "float32", "LOGIT_ROWS", "V_local"),
        ),
        (_NUM_LOGIT_ROWS,),
        "Logits over this rank's vocabulary range, in FP32 (model.md section 15).",
    ),
    OperatorSpec(
        "tp_logits_all_gather",
        (
            reads("logits", "float32", "LOGIT_ROWS", "V_local"),
            writes("gathered", "float32", "LOGIT_ROWS", "V"),
        ),
        (_NUM_LOGIT_ROWS,),
        "Vocabulary shards side by side in rank order, the same on every rank of the group (model.md section 18).",
    ),
    OperatorSpec(
        "greedy",
        (
            reads("logits", "float32", "LOGIT_ROWS", "V"),
            writes("token_ids", "int64", "LOGIT_ROWS"),
        ),
        (_NUM_LOGIT_ROWS,),
        "The id of the largest logit, the lowest id where several are equal (model.md section 15).",
    ),
)


def _tp_boundaries(phase: str) -> tuple[OperatorSpec, ...]:
    return (
        OperatorSpec(
            f"{phase}_tp_input_all_gather",
            (
                reads("rows", "bfloat16", "T_local", "D"),
                writes("gathered", "bfloat16", "T", "D"),
            ),
            (NUM_TOKENS,),
            "The normed attention input of every rank of the group, in rank order (model.md section 18).",
        ),
        OperatorSpec(
            f"{phase}_tp_output_reduce_scatter",
            (
                reads("output_partial", "float32", "T", "D"),
                writes("attn_output", "float32", "T_local", "D"),
            ),
            (NUM_TOKENS,),
            "This rank's slab of the partials, added in rank order in FP32; inactive rows are zero "
            "(model.md section 18).",
        ),
        OperatorSpec(
            f"{phase}_tp_output_all_reduce",
            (
                reads("output_partial", "float32", "T", "D"),
                writes("attn_output", "float32", "T", "D"),
            ),
            (NUM_TOKENS,),
            "The partials added in rank order in FP32, the same on every rank of the group (model.md section 18).",
        ),
    )


BOUNDARIES: tuple[OperatorSpec, ...] = (*_ENTRY, *_tp_boundaries("prefill"), *_tp_boundaries("decode"), *_EXIT)
"""Entry, TP boundaries by phase, exit."""
