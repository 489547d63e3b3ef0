"""Projections, compressor, publication, indexer, attention and output as calls."""

from __future__ import annotations

import torch

from v41_config import AttentionMode
from v41_goldens.attention_stages import physical_rows
from v41_goldens.candidate_blocks import candidate_blocks
from v41_goldens.compressor import CompressorRows, compress_ratio_1, compress_ratio_2
from v41_goldens.errors import OperandError
from v41_goldens.indexer import IndexQueries, index_keys, index_queries, select_entries
from v41_goldens.modes import first_layer
from v41_goldens.operators.call import Call, Results
from v41_goldens.operators.golden import Golden, each_rank
from v41_goldens.operators.operand_context import check_visible, kept_blocks, operand_context, row_cache
from v41_goldens.output_projection import grouped_output, o_proj
from v41_goldens.paged_cache import publish_compressed_kv, publish_index_key, publish_window_kv
from v41_goldens.qkv import kv_proj_rope, q_proj_qr, q_proj_rope, qkv_proj_rope
from v41_goldens.sparse_attention import sparse_attention


def _q_proj_qr(c: Call) -> Results:
    return {"qr": q_proj_qr(c["x"], c.attention(), c.config)}


def _q_proj_rope(c: Call) -> Results:
    return {"q": q_proj_rope(c["qr"], c.attention(), *c.rope(), c.config)}


def _kv_proj_rope(c: Call) -> Results:
    return {"kv": kv_proj_rope(c["x"], c.attention(), *c.rope(), c.config)}


def _qkv_proj_rope(c: Call) -> Results:
    return dict(zip(("qr", "q", "kv"), qkv_proj_rope(c["x"], c.attention(), *c.rope(), c.config), strict=True))


def _compress_ratio_1(c: Call) -> Results:
    return {"latent": compress_ratio_1(c["x"], c.compressor(), c.config)}


def _compress_ratio_2(c: Call) -> Results:
    rows = CompressorRows(
        closing=c["compressor_source_token_indices"].long(),
        request=c["token_to_req_indices"].long(),
        position=c["position_ids"].long(),
        starts=c["query_start_loc"].long(),
        state_block=c["state_block_table"][:, 0].long(),
    )
    return {"latent": compress_ratio_2(c["x"], c.compressor(), rows, c["state_cache"], c.config)}


def _index_keys(c: Call) -> Results:
    return {"keys": index_keys(c["latent"], c.index_keys(), *c.rope("compressed_"), c.config)}


def _publish_window_kv(c: Call) -> Results:
    publish_window_kv(row_cache(c, "window_kv"), c["slots"], c["kv"])
    return {}


def _publish_compressed_kv(c: Call) -> Results:
    publish_compressed_kv(row_cache(c, "compressed_kv"), c["slots"], c["kv"])
    return {}


def _publish_index_key(c: Call) -> Results:
    publish_index_key(row_cache(c, "index_key"), c["slots"], c["keys"])
    return {}


def _index_queries(c: Call) -> Results:
    indexer = c.attention().indexer
    assert indexer is not None
    queries = index_queries(c["qr"], c["x"], indexer, *c.rope(), c.config)
    return {"index_q": queries.q, "index_weights": queries.weights}


def _candidate_blocks(c: Call) -> Results:
    entries, visible = c["scores"].shape[1], c["compressed_lens"]
    check_visible(c, entries, "the scores of a row")
    seen = torch.arange(entries, device=visible.device) < visible.unsqueeze(-1)
    unknown = (c["scores"].isnan() & seen).any(dim=1)
    if unknown.any():
        raise OperandError(f"candidate_blocks scores[{int(unknown.int().argmax())}]", "a NaN", "numbers")
    chosen = candidate_blocks(c["scores"].masked_fill(~seen, -torch.inf), visible, c.config)
    return {"kept_blocks": chosen.kept, "block_scores": chosen.score}


def _indexer(mode: AttentionMode) -> Golden:
    def results(c: Call) -> Results:
        layer = first_layer(c.config, mode, c.bound.spec.name)
        context = operand_context(c, layer)
        entries = select_entries(context, layer, IndexQueries(c["index_q"], c["index_weights"]))
        found = {"topk_rows": physical_rows(context, layer, entries)}
        if layer.makes_candidates:
            found["kept_blocks"] = kept_blocks(c, context)
        return found

    return each_rank(f"hierarchical_sparse_indexer_{mode.value}", select_entries, results)


def _sparse_attention(c: Call) -> Results:
    return {"o": sparse_attention(c["q"], c["kv"], c["valid"], c["attn_sink"], c.config.head_dim**-0.5)}


def _grouped_output(c: Call) -> Results:
    return {"u": grouped_output(c["o"], c.attention(), *c.rope(), c.config)}


def _o_proj(c: Call) -> Results:
    return {"output_partial": o_proj(c["u"], c.attention(), c.config)}


ATTENTION_STAGES: tuple[Golden, ...] = (
    each_rank("q_proj_qr", q_proj_qr, _q_proj_qr),
    each_rank("q_proj_rope", q_proj_rope, _q_proj_rope),
    each_rank("kv_proj_rope", kv_proj_rope, _kv_proj_rope),
    each_rank("qkv_proj_rope", qkv_proj_rope, _qkv_proj_rope),
    each_rank("compress_ratio_1", compress_ratio_1, _compress_ratio_1),
    each_rank("compress_ratio_2", compress_ratio_2, _compress_ratio_2),
    each_rank("index_keys", index_keys, _index_keys),
    each_rank("publish_window_kv", publish_window_kv, _publish_window_kv),
    each_rank("publish_compressed_kv", publish_compressed_kv, _publish_compressed_kv),
    each_rank("publish_index_key", publish_index_key, _publish_index_key),
    each_rank("index_queries", index_queries, _index_queries),
    each_rank("candidate_blocks", candidate_blocks, _candidate_blocks),
    *(_indexer(mode) for mode in (AttentionMode.C2A_FULL, AttentionMode.C1A_FULL, AttentionMode.C1A_REINDEX)),
    each_rank("sparse_attention", sparse_attention, _sparse_attention),
    each_rank("grouped_output", grouped_output, _grouped_output),
    each_rank("o_proj", o_proj, _o_proj),
)
"""In the order of the ABI."""
