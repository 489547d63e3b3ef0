"""The operator tables: every operator there, shapes as published, weights and caches those of the model."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from v41_config import FLASH, FLASH6, TINY, AttentionMode, ModelConfig, OperatorError, ParallelLayout, cache_pools
from v41_config.data_types import DATA_TYPE_BYTES, DataType, data_type_name
from v41_config.dimensions import CONSTANTS, DIMENSIONS, symbols_of
from v41_config.operator_listing import operators_as_markdown, operators_as_text
from v41_config.operator_spec import CountSpec, OperatorSpec
from v41_config.operator_tables import find_operator, operators
from v41_config.weight_table import WEIGHTS, WeightLayers

DOCS = Path(__file__).parents[1] / "docs"
MODES = ["swa", "c2a_full", "c2a_reuse", "c1a_full", "c1a_reindex", "c1a_reuse"]
NAMES = [
    "materialize_rope_rows", "rms_norm", "quantized_linear", "q_proj_qr", "q_proj_rope", "kv_proj_rope",
    "qkv_proj_rope", "grouped_output", "o_proj", "mhc_mixes", "mhc_pre", "mhc_post", "hc_head", "compress_ratio_1",
    "compress_ratio_2", "publish_window_kv", "publish_compressed_kv", "publish_index_key", "candidate_blocks",
    "gate", "dispatch", "routed_experts", "shared_expert", "combine", "moe", "input_pack", "embed", "lm_head", "greedy",
    *(f"hierarchical_sparse_indexer_{mode}" for mode in ("c2a_full", "c1a_full", "c1a_reindex")),
    *(f"{phase}_attn_{mode}" for phase in ("prefill", "decode") for mode in MODES),
    *(f"{phase}_{mode}{end}" for phase in ("prefill", "decode") for mode in MODES for end in ("", "_sharded")),
    *(f"{phase}_tp_{end}" for phase in ("prefill", "decode")
      for end in ("input_all_gather", "output_reduce_scatter", "output_all_reduce")),
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_operator_of_the_model_is_there(name: str) -> None:
    assert find_operator(name).name == name


def test_an_unknown_operator_is_refused() -> None:
    with pytest.raises(OperatorError, match=r"^operator: expected one of materialize_rope_rows, .*found 'xyzzy'"):
        find_operator("xyzzy")
    with pytest.raises(OperatorError, match=r"^operator: expected an operator \(did you mean mhc_mixes\?\), found"):
        find_operator("hc_mix")


@pytest.mark.parametrize("spec", operators().values(), ids=lambda spec: spec.name)
def test_a_spec_is_consistent_in_itself(spec: OperatorSpec) -> None:
    names = [tensor.name for tensor in spec.tensors] + [scalar.name for scalar in spec.scalars]
    assert len(names) == len(set(names))
    assert spec.destinations
    assert "model.md section" in spec.doc
    assert set(spec.symbols) <= set(DIMENSIONS)
    shown = {dim for tensor in spec.tensors for dim in tensor.dims}
    for scalar in spec.scalars:
        if isinstance(scalar, CountSpec):
            assert scalar.limit in shown or scalar.required


@pytest.mark.parametrize("spec", operators().values(), ids=lambda spec: spec.name)
@pytest.mark.parametrize(("config", "layout"), [(FLASH, ParallelLayout(4, 2)), (FLASH6, ParallelLayout(8, 1)),
                                                (TINY, ParallelLayout(1, 4))])  # fmt: skip
def test_every_spec_binds(spec: OperatorSpec, config: ModelConfig, layout: ParallelLayout) -> None:
    bound = spec.bind(config, layout, **dict.fromkeys(spec.given, 64))
    assert set(bound.dims) == set(spec.symbols)
    assert all(len(tensor.shape) == len(tensor.spec.dims) for tensor in bound.tensors.values())


def test_every_symbol_is_used() -> None:
    used = {symbol for spec in operators().values() for t in spec.tensors for d in t.dims for symbol in symbols_of(d)}
    used |= {s.limit for spec in operators().values() for s in spec.scalars if isinstance(s, CountSpec)}
    assert set(DIMENSIONS) - used <= {"TP"}


# A published example: TP4, DP2, three requests of 3, 2 and 3 tokens in each group; shapes of one card.
EIGHT_TOKENS = [
    ("input_pack", "embedded", (2, 5120)),
    ("input_pack", "x_hc", (2, 4, 5120)),
    ("decode_tp_input_all_gather", "rows", (2, 5120)),
    ("decode_tp_input_all_gather", "gathered", (8, 5120)),
    ("q_proj_rope", "q", (8, 16, 512)),
    ("sparse_attention", "o", (8, 16, 512)),
    ("grouped_output", "u", (8, 2 * 1024)),
    ("o_proj", "output_partial", (8, 5120)),
    ("prefill_tp_output_reduce_scatter", "attn_output", (2, 5120)),
    ("prefill_tp_output_all_reduce", "attn_output", (8, 5120)),
    ("prefill_c2a_full_sharded", "x_hc", (2, 4, 5120)),
    ("prefill_c2a_full_sharded", "attn_input", (8, 5120)),
    ("prefill_c2a_full_sharded", "attn_output", (2, 5120)),
    ("prefill_c2a_full_sharded", "next_pre_mix", (2, 4)),
    ("prefill_c2a_full", "x_hc_out", (8, 4, 5120)),
    ("prefill_c2a_full", "state_cache", (3, 4, 1024)),
    ("prefill_c2a_full", "query_start_loc", (4,)),
    ("decode_attn_c1a_full", "window_indices", (8, 128)),
    ("decode_attn_c1a_full", "window_kv", (3, 128, 1, 512)),
    ("decode_attn_c1a_full", "window_kv_scale", (3, 128, 1, 16)),
    ("decode_attn_c1a_full", "compressed_kv", (3, 128, 1, 256)),
    ("decode_attn_c1a_full", "compressed_kv_scale", (3, 128, 1, 32)),
    ("decode_attn_c1a_full", "index_key", (3, 128, 1, 64)),
    ("decode_attn_c1a_full", "index_key_scale", (3, 128, 1, 4)),
    ("decode_attn_c1a_full", "topk_rows", (8, 512)),
    ("decode_attn_c1a_full", "kept_blocks", (8, 1)),
    ("dispatch", "expert_ids", (2, 6)),
    ("dispatch", "rows", (12, 5120)),
    ("dispatch", "send_counts", (8,)),
    ("routed_experts", "w1", (48, 2304, 2560)),
    ("routed_experts", "w2_scale", (48, 5120, 72)),
    ("moe", "out", (2, 5120)),
    ("embed", "embed_weight", (32320, 5120)),
    ("lm_head", "logits", (3, 32320)),
    ("greedy", "logits", (3, 129280)),
]
EXTENTS = {"T": 8, "B": 3, "R": 12, "G": 3, "LOGIT_ROWS": 3, "CAPACITY": 4096, "ENTRIES": 3, "PAGES": 1,
           "WINDOW_BLOCKS": 3, "COMPRESSED_BLOCKS": 3, "STATE_BLOCKS": 3, "ATTENDED": 640}  # fmt: skip


@pytest.mark.parametrize(("name", "tensor", "shape"), EIGHT_TOKENS)
def test_shapes_of_the_published_example(name: str, tensor: str, shape: tuple[int, ...]) -> None:
    spec = find_operator(name)
    bound = spec.bind(FLASH, ParallelLayout(4, 2), **EXTENTS)
    assert bound.shapes[tensor] == shape


@pytest.mark.parametrize("config", [FLASH, FLASH6, TINY])
def test_the_entry_of_each_layer_takes_exactly_the_attention_weights_of_that_layer(config: ModelConfig) -> None:
    """From the weight table's layers on one side and from the mode's operands on the other."""
    seen = set()
    for layer in config.layers:
        of_layer = {
            name
            for name, weight in WEIGHTS.items()
            if ".attn." in weight.checkpoint and layer.layer_id in weight.layers.ids(config)
        }
        taken = {tensor.name for tensor in find_operator(f"decode_attn_{layer.mode.value}").tensors} & set(WEIGHTS)
        assert taken == of_layer, layer
        seen.add(layer.mode)
    assert seen == set(AttentionMode)


def test_every_weight_is_an_operand_somewhere() -> None:
    taken = {tensor.name for spec in operators().values() for tensor in spec.tensors}
    by_generic_operators = {"hc_ffn_fn", "hc_ffn_base", "hc_ffn_scale", "ffn_norm", "norm"}  # mhc_mixes, rms_norm
    assert set(WEIGHTS) - taken == by_generic_operators


@pytest.mark.parametrize("mode", AttentionMode)
def test_phases_of_a_mode_differ_in_name_alone(mode: AttentionMode) -> None:
    for stem in ("attn_{}", "{}", "{}_sharded"):
        prefill, decode = (find_operator(f"{phase}_{stem.format(mode.value)}") for phase in ("prefill", "decode"))
        assert (prefill.tensors, prefill.scalars, prefill.doc) == (decode.tensors, decode.scalars, decode.doc)


def test_only_modes_that_score_have_a_score_budget_and_only_owners_write_their_caches() -> None:
    for mode in AttentionMode:
        spec = find_operator(f"decode_attn_{mode.value}")
        scalars = {scalar.name for scalar in spec.scalars}
        directions = {tensor.name: tensor.direction for tensor in spec.tensors}
        scores = mode in (AttentionMode.C2A_FULL, AttentionMode.C1A_FULL, AttentionMode.C1A_REINDEX)
        assert ("max_logits_bytes" in scalars) == scores
        assert directions["window_kv"] == "inout"
        assert directions.get("topk_rows") == (None if mode is AttentionMode.SWA else "out" if scores else "in")
        owns = mode in (AttentionMode.C2A_FULL, AttentionMode.C1A_FULL)
        assert directions.get("compressed_kv", "inout") == ("inout" if owns or mode is AttentionMode.SWA else "in")
        assert ("state_cache" in directions) == (mode is AttentionMode.C2A_FULL)


def test_cache_operands_are_the_pools_of_the_cache_abi() -> None:
    spec = find_operator("decode_attn_c2a_full")
    for config in (FLASH, TINY):
        bound = spec.bind(config, ParallelLayout(), **EXTENTS)
        pools = {pool.name: pool for pool in cache_pools(config)}
        for operand, name in (("window_kv", "window"), ("compressed_kv", "c2a_cmp_kv"), ("index_key", "c2a_index_key"),
                              ("state_cache", "c2a_state")):  # fmt: skip
            pool, payload = pools[name], bound.tensors[operand]
            assert (payload.shape, payload.spec.dtype) == (pool.payload.shape(3), pool.payload.dtype)
            if pool.scale is not None:
                scale = bound.tensors[f"{operand}_scale"]
                assert (scale.shape, scale.spec.dtype) == (pool.scale.shape(3), pool.scale.dtype)


def test_data_types_are_named_as_numpy_and_torch_name_them() -> None:
    assert set(DATA_TYPE_BYTES) == set(get_args(DataType))
    for name in ("float32", "int8", "uint8", "int32", "int64", "bool"):
        assert data_type_name(np.dtype(name)) == name
        assert np.dtype(name).itemsize == DATA_TYPE_BYTES[name]
    assert data_type_name("torch.float8_e8m0fnu") == "float8_e8m0fnu"


def test_layers_of_weights() -> None:
    assert WeightLayers.KV_SOURCES.ids(FLASH) == (2, 8, 14, 20)
    assert WeightLayers.POOLING_KV_SOURCES.ids(FLASH) == (2, 8, 14)
    assert WeightLayers.INDEX_SOURCES.ids(FLASH) == (2, 8, 14, 20, 24, 28, 32, 36)
    assert len(WeightLayers.ALL.ids(FLASH)) == 40
    assert len(WeightLayers.NONE.ids(FLASH)) == 1


def test_listings_name_every_operator_and_tensor() -> None:
    specs = operators()
    for text in (operators_as_text(specs.values()), operators_as_markdown(specs.values())):
        assert all(name in text for name in specs)
        assert all(tensor.name in text for spec in specs.values() for tensor in spec.tensors)
    assert len(CONSTANTS) == 4


def test_the_markdown_in_the_docs_is_current() -> None:
    written = (DOCS / "operators.md").read_text(encoding="utf-8")
    assert written == operators_as_markdown(operators().values()), "run v41-config operators --markdown"


def test_a_text_block() -> None:
    assert operators_as_text([find_operator("hc_head"), find_operator("rms_norm")]).splitlines() == [
        "hc_head",
        f"    {find_operator('hc_head').doc}",
        "    in    x_hc     bfloat16       [T, HC, D]",
        "    in    pre_mix  float32        [T, HC]",
        "    out   out      bfloat16       [T, D]",
        "    scalar 0 <= num_tokens <= T",
        "",
        "rms_norm",
        "    x rsqrt(mean(x^2) + eps) weight in FP32, one rounding (model.md section 6).",
        "    in    x       bfloat16       [T, D]",
        "    in    weight  bfloat16       [D]",
        "    out   out     bfloat16       [T, D]",
        "    scalar 0 <= num_tokens <= T",
        "    scalar eps = rms_norm_eps",
    ]


def test_operators_that_differ_in_name_alone_are_listed_together() -> None:
    text = operators_as_text(operators().values())
    assert "prefill_attn_swa\ndecode_attn_swa\n" in text
    assert len(list(itertools.takewhile(str.strip, text.splitlines()))) > 3
