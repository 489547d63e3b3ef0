"""The other format of the release: `inference/config.json`, flat and with names of its own (model.md section 1).

It has no token ids and no context length: ids are the release's then, and the context is what YaRN extends the
original one to, `rope_factor * original_seq_len`, unless the file sets `max_seq_len`. Its `vision_*` settings are
not read, so they are among the keys reported as ignored.
"""

from __future__ import annotations

from typing import Any

from v41_config.errors import ConfigError
from v41_config.json_groups import group_json, join_drafting_ratios, json_value, pop_group, split_drafting_ratios
from v41_config.model_config import ModelConfig, RopeScaling
from v41_config.released_json import DRAFTING_KEYS, ENGRAM_KEYS

_TEXT_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "moe_intermediate_size": "moe_inter_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "head_dim": "head_dim",
    "qk_rope_head_dim": "rope_head_dim",
    "q_lora_rank": "q_lora_rank",
    "o_lora_rank": "o_lora_rank",
    "o_groups": "o_groups",
    "swiglu_limit": "swiglu_limit",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
    "compress_rope_theta": "compress_rope_theta",
    "n_routed_experts": "n_routed_experts",
    "n_shared_experts": "n_shared_experts",
    "num_experts_per_tok": "n_activated_experts",
    "scoring_func": "score_func",
    "routed_scaling_factor": "route_scale",
    "sliding_window": "window_size",
    "compress_ratios": "compress_ratios",
    "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers",
    "index_n_heads": "index_n_heads",
    "index_head_dim": "index_head_dim",
    "index_topk": "index_topk",
    "candidate_source_layer_id": "candidate_source_layer",
    "candidate_topk_blocks": "candidate_topk_blocks",
    "candidate_block_size": "candidate_block_size",
    "hc_mult": "hc_mult",
    "hc_sinkhorn_iters": "hc_sinkhorn_iters",
    "hc_eps": "hc_eps",
}
_ROPE_KEYS = {
    "factor": "rope_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "original_max_position_embeddings": "original_seq_len",
}
_ENGRAM_KEYS = {**ENGRAM_KEYS, "pad_token_id": "engram_pad_id"}
_DRAFTING_KEYS = {
    **DRAFTING_KEYS,
    "num_nextn_predict_layers": "n_mtp_layers",
    "num_experts_per_tok": "dspark_n_activated_experts",
}
_CONTEXT_KEY = "max_seq_len"
_FIXED = {"dtype": "fp8", "gate_temp": 1.0}
"""Settings that the model has in one value only; the second has that default."""


def is_inference_json(data: dict[str, Any]) -> bool:
    """Whether a file's object is in this format: it has a key of this format and neither of the other's."""
    return "dim" in data and not {"model_type", "text_config"} & set(data)


def inference_json(config: ModelConfig) -> dict[str, Any]:
    """The flat dictionary of `inference/config.json`; token ids and vision have no place in it."""
    drafting_layers = config.drafting.num_nextn_predict_layers if config.drafting else 0
    data = group_json(config, _TEXT_KEYS)
    data["compress_ratios"] = join_drafting_ratios(config.compress_ratios, drafting_layers)
    data |= group_json(config.rope_scaling, _ROPE_KEYS)
    if config.max_position_embeddings != _extended_context(json_value(config.rope_scaling)):
        data[_CONTEXT_KEY] = config.max_position_embeddings
    data |= group_json(config.engram, _ENGRAM_KEYS) if config.engram else {"engram_layer_ids": []}
    data |= group_json(config.drafting, _DRAFTING_KEYS) if config.drafting else {"n_mtp_layers": 0}
    return data | {"dtype": _FIXED["dtype"], "expert_dtype": config.quantization.expert_dtype}


def inference_fields(data: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fields of `ModelConfig` from a file's object, which is used up, and the keys that nobody knows."""
    for key, absent in (("dtype", None), ("gate_temp", _FIXED["gate_temp"])):
        if (found := data.pop(key, absent)) != _FIXED[key]:
            raise ConfigError(key, found, repr(_FIXED[key]))
    fields: dict[str, Any] = {field: data.pop(key) for field, key in _TEXT_KEYS.items() if key in data}
    fields["rope_scaling"] = {field: data.pop(key) for field, key in _ROPE_KEYS.items() if key in data}
    context = data.pop(_CONTEXT_KEY, _extended_context(fields["rope_scaling"]))
    if context is None:
        raise ConfigError(_CONTEXT_KEY, None, "a context, or rope_factor * original_seq_len that is one")
    fields["max_position_embeddings"] = context
    if "norm_topk_prob" in data:
        fields["norm_topk_prob"] = data.pop("norm_topk_prob")
    if "expert_dtype" not in data:
        raise ConfigError("expert_dtype", None, "the format of the routed experts")
    fields["quantization"] = {"expert_dtype": data.pop("expert_dtype")}
    fields["engram"] = pop_group(data, _ENGRAM_KEYS, "engram_layer_ids")
    fields["drafting"] = pop_group(data, _DRAFTING_KEYS, "n_mtp_layers")
    split_drafting_ratios(fields)
    return fields, sorted(data)


def _extended_context(rope_scaling: dict[str, Any]) -> int | None:
    """Positions that YaRN reaches; None where the settings are incomplete or the product is no whole number."""
    try:
        scaling = RopeScaling.model_validate(rope_scaling)
    except ValueError:
        return None
    positions = scaling.factor * scaling.original_max_position_embeddings
    return int(positions) if positions == int(positions) else None
