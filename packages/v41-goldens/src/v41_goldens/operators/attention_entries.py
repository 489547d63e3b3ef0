"""The twelve attention entries, and the half layers around them, as calls."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from v41_config import AttentionMode
from v41_goldens.capture import layer_key
from v41_goldens.hyper_connections import mhc_mixes, mhc_post, mhc_pre
from v41_goldens.modes import ATTENTION, first_layer
from v41_goldens.operators.call import Call, Results
from v41_goldens.operators.golden import Golden, Ranks, each_rank, joint
from v41_goldens.operators.operand_context import kept_blocks, operand_context
from v41_goldens.rank_simulator import all_gather_tokens, all_reduce, reduce_scatter_tokens
from v41_goldens.rms_norm import rms_norm


def _attention(call: Call, mode: AttentionMode, x: Tensor) -> Results:
    """A mode's FP32 partial, and what it selects."""
    layer = first_layer(call.config, mode, call.bound.spec.name)
    context = operand_context(call, layer)
    if call.selection is not None:
        context.injected = {layer_key(layer.layer_id, "topk"): call.selection}
    results = {"output_partial": ATTENTION[mode](context, layer, call.attention(), x)}
    if layer.owns_index:
        results["topk_rows"] = context.topk[layer.layer_id]
    if layer.makes_candidates:
        results["kept_blocks"] = kept_blocks(call, context)
    return results


def half_layer(calls: Sequence[Call], mode: AttentionMode, sharded: bool) -> list[Results]:
    """Attention between hyper-connections for the ranks of a TP group (model.md sections 5 and 18).

    Each rank collapses its rows with the incoming pre-mix and norms them; `sharded`: the slabs are gathered for
    attention and the FP32 partials come back by slab; otherwise every rank holds all rows and the whole sum. The
    sum is rounded to BF16 once, expanded, and the mixes' own pre goes on to the next sublayer.
    """
    config = calls[0].config
    mixes = [mhc_mixes(call["x_hc"], call.hyper_connection("hc_attn_"), config) for call in calls]
    normed = [
        rms_norm(mhc_pre(call["x_hc"], call["incoming_pre_mix"]), call["attn_norm"], config.rms_norm_eps)
        for call in calls
    ]
    inputs = [all_gather_tokens(normed)] * len(calls) if sharded else normed
    results = [_attention(call, mode, x) for call, x in zip(calls, inputs, strict=True)]
    partials = [result.pop("output_partial") for result in results]
    summed = (
        reduce_scatter_tokens(partials, calls[0].bound.dims["T_local"])
        if sharded
        else [all_reduce(partials)] * len(calls)
    )
    for call, result, x, total, (pre, post, comb) in zip(calls, results, inputs, summed, mixes, strict=True):
        output = total.bfloat16()
        result |= {
            "attn_input": x,
            "attn_output": output,
            "x_hc_out": mhc_post(output, call["x_hc"], post, comb),
            "next_pre_mix": pre,
        }
    return results


def _entry(phase: str, mode: AttentionMode) -> Golden:
    def results(call: Call) -> Results:
        return _attention(call, mode, call["x"])

    return each_rank(f"{phase}_attn_{mode.value}", ATTENTION[mode], results)


def _half_layer(phase: str, mode: AttentionMode, sharded: bool) -> Golden:
    def results(calls: Sequence[Call]) -> list[Results]:
        return half_layer(calls, mode, sharded)

    return joint(f"{phase}_{mode.value}{'_sharded' if sharded else ''}", half_layer, Ranks.TP_GROUP, results)


PHASES = ("prefill", "decode")

ATTENTION_ENTRIES: tuple[Golden, ...] = (
    *(_entry(phase, mode) for phase in PHASES for mode in AttentionMode),
    *(_half_layer(phase, mode, sharded) for phase in PHASES for mode in AttentionMode for sharded in (False, True)),
)
"""In the order of the ABI."""
