"""Entry, exit and the transports of a TP group as calls."""

from __future__ import annotations

from collections.abc import Sequence

from v41_goldens.block import entry_streams
from v41_goldens.embedding import embedded_partial
from v41_goldens.greedy import greedy_tokens
from v41_goldens.linear import fp32_linear
from v41_goldens.operators.call import Call, Results
from v41_goldens.operators.golden import Golden, Ranks, each_rank, joint
from v41_goldens.rank_simulator import all_gather_tokens, all_reduce, gather_vocabulary, reduce_scatter_tokens
from v41_goldens.rope import materialize_rope_rows


def _materialize_rope_rows(c: Call) -> Results:
    positions = c["position_ids"]
    rows = materialize_rope_rows(c["freqs_cos"], c["freqs_sin"], positions, len(positions))
    return dict(zip(("rope_cos", "rope_sin"), rows, strict=True))


def _embed(c: Call) -> Results:
    partial = embedded_partial(c["token_ids"], c["embed_weight"], int(c.scalars["vocab_start"]), c.config.vocab_size)
    return {"embedded_partial": partial}


def _input_pack(c: Call) -> Results:
    return dict(zip(("x_hc", "pre_mix"), entry_streams(c["embedded"], c.config.hc_mult), strict=True))


def _all_gather(calls: Sequence[Call]) -> list[Results]:
    gathered = all_gather_tokens([call["rows"] for call in calls])
    return [{"gathered": gathered} for _ in calls]


def _reduce_scatter(calls: Sequence[Call]) -> list[Results]:
    slabs = reduce_scatter_tokens([call["output_partial"] for call in calls], calls[0].bound.dims["T_local"])
    return [{"attn_output": slab} for slab in slabs]


def _all_reduce(calls: Sequence[Call]) -> list[Results]:
    total = all_reduce([call["output_partial"] for call in calls])
    return [{"attn_output": total} for _ in calls]


def _logits_all_gather(calls: Sequence[Call]) -> list[Results]:
    gathered = gather_vocabulary([call["logits"] for call in calls])
    return [{"gathered": gathered} for _ in calls]


def _lm_head(c: Call) -> Results:
    return {"logits": fp32_linear(c["normed"], c["head_weight"])}


def _greedy(c: Call) -> Results:
    return {"token_ids": greedy_tokens(c["logits"])}


BOUNDARIES: tuple[Golden, ...] = (
    each_rank("materialize_rope_rows", materialize_rope_rows, _materialize_rope_rows),
    each_rank("embed", embedded_partial, _embed),
    each_rank("input_pack", entry_streams, _input_pack),
    *(
        joint(f"{phase}_tp_{name}", function, Ranks.TP_GROUP, results)
        for phase in ("prefill", "decode")
        for name, function, results in (
            ("input_all_gather", all_gather_tokens, _all_gather),
            ("output_reduce_scatter", reduce_scatter_tokens, _reduce_scatter),
            ("output_all_reduce", all_reduce, _all_reduce),
        )
    ),
    each_rank("lm_head", fp32_linear, _lm_head),
    joint("tp_logits_all_gather", gather_vocabulary, Ranks.TP_GROUP, _logits_all_gather),
    each_rank("greedy", greedy_tokens, _greedy),
)
"""In the order of the ABI."""
