"""The six attention modes, prefill and decode, alone and wired into the residual streams.

Both phases of a mode take the same operands: prefill, chunked prefill and decode differ in metadata only.
"""

from __future__ import annotations

from v41_config.layer_plan import AttentionMode
from v41_config.operator_spec import ConstantSpec, OperatorSpec, TensorSpec
from v41_config.operator_tables.attention_stages import (
    CANDIDATE_CONSTANTS,
    COMPRESSOR_STATE,
    KEPT_BLOCKS,
    SCORE_BUDGET,
    SELECTION_METADATA,
    TOPK_ROWS,
    X,
)
from v41_config.operator_tables.operand import (
    EPS,
    HC_CONSTANTS,
    NUM_TOKENS,
    as_direction,
    cache,
    reads,
    rope_rows,
    weights,
    writes,
)

PHASES = ("prefill", "decode")

_OWNERS = {AttentionMode.C2A_FULL, AttentionMode.C1A_FULL}
"""Modes that compress and publish."""

_SELECTORS = {*_OWNERS, AttentionMode.C1A_REINDEX}
"""Modes that score keys."""

_DOCS = {
    AttentionMode.SWA: "The sliding window alone",
    AttentionMode.C2A_FULL: "Compress pairs, publish their KV and index keys, select, attend",
    AttentionMode.C2A_REUSE: "Attend to the KV and the selection of the source",
    AttentionMode.C1A_FULL: "Compress every token, publish, choose candidate blocks, select, attend",
    AttentionMode.C1A_REINDEX: "Score the source's keys inside its candidate blocks, attend",
    AttentionMode.C1A_REUSE: "Attend to the source's KV and the latest selection over it",
}

_ALWAYS = (
    *weights("wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "attn_sink", "wo_a", "wo_b"),
    *rope_rows("T"),
    reads("window_slots", "int64", "T"),
    reads("window_indices", "int32", "T", "WINDOW"),
    *cache("window_kv", "inout"),
)


def _compression(mode: AttentionMode) -> tuple[TensorSpec, ...]:
    """What a mode that owns compressed KV takes for it."""
    ratio_2 = mode is AttentionMode.C2A_FULL
    return (
        *weights("compressor_wkv", *(["compressor_wgate"] if ratio_2 else []), "compressor_norm"),
        *weights("index_wk", "index_k_norm"),
        *rope_rows("T", "compressed_"),
        *(COMPRESSOR_STATE if ratio_2 else (reads("token_to_req_indices", "int32", "T"),)),
        reads("compressed_slots", "int64", "T"),
        reads("index_slots", "int64", "T"),
    )


def _selection(mode: AttentionMode) -> tuple[TensorSpec, ...]:
    """What a mode takes to choose entries, or the selection it is given."""
    if mode not in _SELECTORS:
        return as_direction((TOPK_ROWS,), "in")
    candidates = {
        AttentionMode.C1A_FULL: (KEPT_BLOCKS,),
        AttentionMode.C1A_REINDEX: as_direction((KEPT_BLOCKS,), "in"),
    }.get(mode, ())
    return (
        *weights("index_wq_b", "index_weights_proj"),
        *(() if mode in _OWNERS else (reads("token_to_req_indices", "int32", "T"),)),
        *SELECTION_METADATA,
        *cache("index_key", "inout" if mode in _OWNERS else "in"),
        *candidates,
        TOPK_ROWS,
    )


def _operands(mode: AttentionMode) -> tuple[TensorSpec, ...]:
    """Everything but the input and the output of an attention."""
    if mode is AttentionMode.SWA:
        return _ALWAYS
    owned = mode in _OWNERS
    return (
        *_ALWAYS,
        *(_compression(mode) if owned else ()),
        *cache("compressed_kv", "inout" if owned else "in"),
        *_selection(mode),
    )


def _constants(mode: AttentionMode) -> tuple[ConstantSpec, ...]:
    """Constants of the selection: the score budget, and the candidate blocks of the modes that know them."""
    candidates = {AttentionMode.C1A_FULL: CANDIDATE_CONSTANTS, AttentionMode.C1A_REINDEX: CANDIDATE_CONSTANTS[:1]}
    return (SCORE_BUDGET, *candidates.get(mode, ())) if mode in _SELECTORS else ()


def _attention(phase: str, mode: AttentionMode) -> OperatorSpec:
    return OperatorSpec(
        f"{phase}_attn_{mode.value}",
        (X, *_operands(mode), writes("output_partial", "float32", "T", "D")),
        (NUM_TOKENS, EPS, *_constants(mode)),
        f"{_DOCS[mode]}; FP32 partial of this rank's heads (model.md sections 8 to 13).",
    )


def _half_layer(phase: str, mode: AttentionMode, sharded: bool) -> OperatorSpec:
    rows = "T_local" if sharded else "T"
    wiring = (
        "the residual stays in token slabs: AllGather of the normed input, ReduceScatter of the partials"
        if sharded
        else "every rank holds all rows: all-reduce of the partials"
    )
    return OperatorSpec(
        f"{phase}_{mode.value}{'_sharded' if sharded else ''}",
        (
            reads("x_hc", "bfloat16", rows, "HC", "D"),
            reads("incoming_pre_mix", "float32", rows, "HC"),
            *weights("hc_attn_fn", "hc_attn_base", "hc_attn_scale", "attn_norm"),
            *_operands(mode),
            writes("attn_input", "bfloat16", "T", "D"),
            writes("attn_output", "bfloat16", rows, "D"),
            writes("x_hc_out", "bfloat16", rows, "HC", "D"),
            writes("next_pre_mix", "float32", rows, "HC"),
        ),
        (NUM_TOKENS, *HC_CONSTANTS, *_constants(mode)),
        f"{mode.title} between hyper-connections, {wiring} (model.md sections 5 and 18).",
    )


ATTENTION_ENTRIES: tuple[OperatorSpec, ...] = (
    *(_attention(phase, mode) for phase in PHASES for mode in AttentionMode),
    *(
        _half_layer(phase, mode, sharded)
        for phase in PHASES
        for mode in AttentionMode
        for sharded in (False, True)
    ),
)  # fmt: skip
"""`{phase}_attn_{mode}`, then the half layers `{phase}_{mode}` (replicated) and `{phase}_{mode}_sharded`."""
