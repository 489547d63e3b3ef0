"""Contracts of the kernels that only compositions and variants launch: the operator ABI has no name for them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from v41_config import CountSpec, OperatorSpec, TensorSpec
from v41_config.operator_spec import ConstantSpec

_NUM_TOKENS = CountSpec("num_tokens", limit="T")


def _in(name: str, dtype: str, *dims: int | str) -> TensorSpec:
    return TensorSpec(name, dims, dtype)  # type: ignore[arg-type]


def _out(name: str, dtype: str, *dims: int | str) -> TensorSpec:
    return TensorSpec(name, dims, dtype, "out")  # type: ignore[arg-type]


_QUERIES = _in("q", "bfloat16", "T", "H_local", "HEAD_DIM")
_ATTENDED = _out("o", "bfloat16", "T", "H_local", "HEAD_DIM")
_SINK = _in("attn_sink", "float32", "H_local")
_WINDOW = (
    _in("window_kv", "float8_e4m3fn", "WINDOW_BLOCKS", "BLOCK_ROWS", 1, "HEAD_DIM"),
    _in("window_kv_scale", "float8_e8m0fnu", "WINDOW_BLOCKS", "BLOCK_ROWS", 1, "HEAD_DIM/MX"),
    _in("window_indices", "int32", "T", "WINDOW"),
)
_COMPRESSED = (
    _in("compressed_kv", "uint8", "COMPRESSED_BLOCKS", "BLOCK_ROWS", 1, "HEAD_DIM/2"),
    _in("compressed_kv_scale", "float8_e4m3fn", "COMPRESSED_BLOCKS", "BLOCK_ROWS", 1, "HEAD_DIM/FP4_GROUP"),
    _in("topk_rows", "int32", "T", "INDEX_TOPK"),
)

_STAGES = (
    OperatorSpec(
        "window_attention",
        (_QUERIES, *_WINDOW, _SINK, _ATTENDED),
        (_NUM_TOKENS,),
        "sparse_attention over the window's rows, decoded from their pages (model.md sections 12 and 16).",
    ),
    OperatorSpec(
        "selected_attention",
        (_QUERIES, *_WINDOW, *_COMPRESSED, _SINK, _ATTENDED),
        (_NUM_TOKENS,),
        "sparse_attention over window and selection, decoded from their pages (model.md sections 12 and 16).",
    ),
    OperatorSpec(
        "compress_pairs",
        (
            _in("x", "bfloat16", "T", "D"),
            _in("compressor_wkv", "bfloat16", "HEAD_DIM", "D"),
            _in("compressor_wgate", "bfloat16", "HEAD_DIM", "D"),
            _in("compressor_norm", "bfloat16", "HEAD_DIM"),
            _in("query_start_loc", "int32", "B+1"),
            _in("position_ids", "int32", "T"),
            _in("token_to_req_indices", "int32", "T"),
            _in("state_block_table", "int32", "B", 1),
            TensorSpec("state_cache", ("STATE_BLOCKS", "STATE_CAPACITY", "2*HEAD_DIM"), "float32", "inout"),
            _out("latent", "bfloat16", "T", "HEAD_DIM"),
        ),
        (_NUM_TOKENS, ConstantSpec("eps", "rms_norm_eps")),
        "compress_ratio_2 with each latent at the token that closes its pair (model.md section 9).",
    ),
    OperatorSpec(
        "rotate_rows",
        (
            _in("latent", "bfloat16", "G", "HEAD_DIM"),
            _in("compressed_rope_cos", "float32", "G", "HALF_ROPE"),
            _in("compressed_rope_sin", "float32", "G", "HALF_ROPE"),
            _out("kv", "bfloat16", "G", "HEAD_DIM"),
        ),
        (),
        "Rotated latents, the rows that publish_compressed_kv takes (model.md section 7).",
    ),
    OperatorSpec(
        "output_rounding",
        (_in("output_partial", "float32", "T", "D"), _out("attn_output", "bfloat16", "T", "D")),
        (_NUM_TOKENS,),
        "The rounding behind the sum over ranks (model.md section 13).",
    ),
    OperatorSpec(
        "routed_rows",
        (_in("x", "bfloat16", "T", "D"), _out("rows", "bfloat16", "T", "TOPK", "D")),
        (_NUM_TOKENS,),
        "A row for each choice of an expert, where every expert is here (model.md section 14).",
    ),
    OperatorSpec(
        "quantized_activations",
        (
            _in("x", "bfloat16", "T", "K"),
            _out("codes", "float8_e4m3fn", "T", "K"),
            _out("scale", "float8_e8m0fnu", "T", "K/MX"),
        ),
        (_NUM_TOKENS,),
        "Activations as MXFP8, the rows that an MX product takes (model.md section 2.4).",
    ),
)

LAUNCHED_STAGES: Mapping[str, OperatorSpec] = MappingProxyType({spec.name: spec for spec in _STAGES})
"""Contracts by name."""
