"""What the attention modes are composed of: projections, compressor, publication, indexer, attention, output."""

from __future__ import annotations

from v41_config.operator_spec import ConstantSpec, OperatorSpec
from v41_config.operator_tables.operand import EPS, NUM_TOKENS, cache, reads, rope_rows, updates, weights, writes

MAX_LOGITS_BYTES = 512 << 20
"""Default budget of the indexer's FP32 scores; queries are split to fit, one row always goes through."""

SCORE_BUDGET = ConstantSpec("max_logits_bytes", MAX_LOGITS_BYTES)

CANDIDATE_CONSTANTS = (
    ConstantSpec("candidate_block_size", "candidate_block_size"),
    ConstantSpec("candidate_topk_blocks", "candidate_topk_blocks"),
)

X = reads("x", "bfloat16", "T", "D")
_QR = reads("qr", "bfloat16", "T", "Q_LORA")

_PROJECTIONS = (
    OperatorSpec(
        "q_proj_qr",
        (X, *weights("wq_a", "q_norm"), writes("qr", "bfloat16", "T", "Q_LORA")),
        (NUM_TOKENS, EPS),
        "The normed low-rank query latent (model.md section 8).",
    ),
    OperatorSpec(
        "q_proj_rope",
        (_QR, *weights("wq_b"), *rope_rows("T"), writes("q", "bfloat16", "T", "H_local", "HEAD_DIM")),
        (NUM_TOKENS,),
        "Queries of this rank's heads, their last channels rotated (model.md section 8).",
    ),
    OperatorSpec(
        "kv_proj_rope",
        (X, *weights("wkv", "kv_norm"), *rope_rows("T"), writes("kv", "bfloat16", "T", "HEAD_DIM")),
        (NUM_TOKENS, EPS),
        "Normed and rotated window KV, one head for keys and values, not yet quantised (model.md section 8).",
    ),
    OperatorSpec(
        "qkv_proj_rope",
        (
            X,
            *weights("wq_a", "q_norm", "wq_b", "wkv", "kv_norm"),
            *rope_rows("T"),
            writes("qr", "bfloat16", "T", "Q_LORA"),
            writes("q", "bfloat16", "T", "H_local", "HEAD_DIM"),
            writes("kv", "bfloat16", "T", "HEAD_DIM"),
        ),
        (NUM_TOKENS, EPS),
        "q_proj_qr, q_proj_rope and kv_proj_rope of one input (model.md section 8).",
    ),
)

COMPRESSOR_STATE = (
    reads("query_start_loc", "int32", "B+1"),
    reads("position_ids", "int32", "T"),
    reads("token_to_req_indices", "int32", "T"),
    reads("state_block_table", "int32", "B", 1),
    updates("state_cache", "float32", "STATE_BLOCKS", "STATE_CAPACITY", "2*HEAD_DIM"),
)
"""A ring of each request's last tokens: KV projection, then gate score."""

_LATENT = reads("latent", "bfloat16", "G", "HEAD_DIM")

_COMPRESSOR = (
    OperatorSpec(
        "compress_ratio_1",
        (X, *weights("compressor_wkv", "compressor_norm"), writes("latent", "bfloat16", "T", "HEAD_DIM")),
        (NUM_TOKENS, EPS),
        "Every token's normed latent, not rotated (model.md section 9).",
    ),
    OperatorSpec(
        "compress_ratio_2",
        (
            X,
            *weights("compressor_wkv", "compressor_wgate", "compressor_norm"),
            *COMPRESSOR_STATE,
            reads("compressor_source_token_indices", "int32", "G"),
            writes("latent", "bfloat16", "G", "HEAD_DIM"),
        ),
        (NUM_TOKENS, EPS),
        "Latents of the pairs that close here, pooled per channel; every read of the state comes before its writes, "
        "the last min(rows, STATE_CAPACITY) tokens of a request (model.md section 9).",
    ),
    OperatorSpec(
        "index_keys",
        (
            _LATENT,
            *weights("index_wk", "index_k_norm"),
            *rope_rows("G", "compressed_"),
            writes("keys", "bfloat16", "G", "INDEX_DIM"),
        ),
        (EPS,),
        "Normed and rotated index keys of latents, not yet quantised (model.md section 10).",
    ),
)

_PUBLICATION = (
    OperatorSpec(
        "publish_window_kv",
        (reads("kv", "bfloat16", "T", "HEAD_DIM"), reads("slots", "int64", "T"), *cache("window_kv", "inout")),
        (NUM_TOKENS,),
        "Quantise to MXFP8 and write at flat rows block * 128 + row; slots of -1 write nothing "
        "(model.md sections 2.5 and 16).",
    ),
    OperatorSpec(
        "publish_compressed_kv",
        (reads("kv", "bfloat16", "G", "HEAD_DIM"), reads("slots", "int64", "G"), *cache("compressed_kv", "inout")),
        (),
        "Quantise to FP4 with E4M3 scales and write; slots of -1 write nothing (model.md sections 2.6 and 16).",
    ),
    OperatorSpec(
        "publish_index_key",
        (reads("keys", "bfloat16", "G", "INDEX_DIM"), reads("slots", "int64", "G"), *cache("index_key", "inout")),
        (),
        "Quantise to FP4 with E8M0 scales and write; slots of -1 write nothing (model.md sections 2.7 and 16).",
    ),
)

SELECTION_METADATA = (
    reads("compressed_block_table", "int32", "B", "PAGES"),
    reads("compressed_lens", "int32", "T"),
)
"""Where a request's compressed rows stand, and how many of them a token sees."""

TOPK_ROWS = writes("topk_rows", "int32", "T", "INDEX_TOPK")
"""A selection: physical rows of the compressed cache in position order, -1 behind the live ones."""

KEPT_BLOCKS = writes("kept_blocks", "bool", "T", "CANDIDATE_BLOCKS")
"""Candidate blocks in request-local compressed positions."""

_SELECTION = (
    reads("index_q", "bfloat16", "T", "INDEX_HEADS", "INDEX_DIM"),
    reads("index_weights", "bfloat16", "T", "INDEX_HEADS"),
    *cache("index_key", "in"),
    *SELECTION_METADATA,
    reads("token_to_req_indices", "int32", "T"),
)

_INDEXER = (
    OperatorSpec(
        "index_queries",
        (
            _QR,
            X,
            *weights("index_wq_b", "index_weights_proj"),
            *rope_rows("T"),
            writes("index_q", "bfloat16", "T", "INDEX_HEADS", "INDEX_DIM"),
            writes("index_weights", "bfloat16", "T", "INDEX_HEADS"),
        ),
        (NUM_TOKENS,),
        "Index queries, rotated, quantised to FP4 and decoded, with scaled head weights (model.md section 10).",
    ),
    OperatorSpec(
        "candidate_blocks",
        (
            reads("scores", "bfloat16", "T", "ENTRIES"),
            reads("compressed_lens", "int32", "T"),
            KEPT_BLOCKS,
            writes("block_scores", "bfloat16", "T", "CANDIDATE_BLOCKS"),
        ),
        (NUM_TOKENS, *CANDIDATE_CONSTANTS),
        "The best blocks of each token by their best entry; the block of the newest visible entry is always kept "
        "(model.md section 11).",
    ),
    OperatorSpec(
        "hierarchical_sparse_indexer_c2a_full",
        (*_SELECTION, TOPK_ROWS),
        (NUM_TOKENS, SCORE_BUDGET),
        "Score the visible keys and publish the best INDEX_TOPK of each token (model.md section 10).",
    ),
    OperatorSpec(
        "hierarchical_sparse_indexer_c1a_full",
        (*_SELECTION, KEPT_BLOCKS, TOPK_ROWS),
        (NUM_TOKENS, SCORE_BUDGET, *CANDIDATE_CONSTANTS),
        "The same, and the candidate blocks that later layers are restricted to (model.md sections 10 and 11).",
    ),
    OperatorSpec(
        "hierarchical_sparse_indexer_c1a_reindex",
        (*_SELECTION, reads("kept_blocks", "bool", "T", "CANDIDATE_BLOCKS"), TOPK_ROWS),
        (NUM_TOKENS, SCORE_BUDGET, CANDIDATE_CONSTANTS[0]),
        "The same inside the candidate blocks alone (model.md sections 10 and 11).",
    ),
)

_ATTENTION = (
    OperatorSpec(
        "sparse_attention",
        (
            reads("q", "bfloat16", "T", "H_local", "HEAD_DIM"),
            reads("kv", "bfloat16", "T", "ATTENDED", "HEAD_DIM"),
            reads("valid", "bool", "T", "ATTENDED"),
            *weights("attn_sink"),
            writes("o", "bfloat16", "T", "H_local", "HEAD_DIM"),
        ),
        (NUM_TOKENS,),
        "Each token's own list of entries, window first; a row without a valid entry is zero (model.md section 12).",
    ),
    OperatorSpec(
        "grouped_output",
        (
            reads("o", "bfloat16", "T", "H_local", "HEAD_DIM"),
            *weights("wo_a"),
            *rope_rows("T"),
            writes("u", "bfloat16", "T", "O_GROUPS_local*O_LORA"),
        ),
        (NUM_TOKENS,),
        "Undo the rotation, then each group's projection with BF16 operands (model.md section 13).",
    ),
    OperatorSpec(
        "o_proj",
        (
            reads("u", "bfloat16", "T", "O_GROUPS_local*O_LORA"),
            *weights("wo_b"),
            writes("output_partial", "float32", "T", "D"),
        ),
        (NUM_TOKENS,),
        "The row-parallel projection, not yet rounded to BF16 (model.md section 13).",
    ),
)

ATTENTION_STAGES: tuple[OperatorSpec, ...] = (
    *_PROJECTIONS,
    *_COMPRESSOR,
    *_PUBLICATION,
    *_INDEXER,
    *_ATTENTION,
)
"""Stages in the order of a Full layer."""
