"""Small models with the structure of a large one: every role of a layer, every ratio, sizes that divide."""

from __future__ import annotations

from v41_config.errors import ConfigError
from v41_config.model_config import MX_GROUP, ModelConfig, RopeScaling
from v41_config.parallel_layout import ParallelLayout

FEWEST_LAYERS = 6
"""One of each attention mode."""

_HEADS_OF_A_GROUP = 2
_FEWEST_GROUPS = 4
_FEWEST_EXPERTS = 16
_TOP_K = 16
_NARROWEST_HEAD = 64
"""Leaves channels that are not rotated beside those that are."""


def scaled_config(
    config: ModelConfig,
    *,
    hidden_size: int = 256,
    num_hidden_layers: int = 10,
    vocab_size: int = 512,
    max_position_embeddings: int = 4096,
    layout: ParallelLayout | None = None,
    **changes: object,
) -> ModelConfig:
    """See `ModelConfig.scaled`."""
    layout = layout or ParallelLayout()
    if num_hidden_layers < FEWEST_LAYERS:
        raise ConfigError("num_hidden_layers", num_hidden_layers, f"at least {FEWEST_LAYERS}, one of each mode")

    def width(field: str, least: int = MX_GROUP) -> int:
        size: int = getattr(config, field)
        return max(least, round(size * hidden_size / config.hidden_size / MX_GROUP) * MX_GROUP)

    head_dim, index_head_dim = (width(field, _NARROWEST_HEAD) for field in ("head_dim", "index_head_dim"))
    groups = _up_to_multiple(_FEWEST_GROUPS, layout.tp)
    yarn = config.rope_scaling
    original = max(1, int(max_position_embeddings // yarn.factor))
    block = config.candidate_block_size
    fields: dict[str, object] = {name: getattr(config, name) for name in ModelConfig.model_fields}
    fields |= dict.fromkeys(("image_token_id", "engram", "drafting", "vision"))
    fields |= {
        "hidden_size": hidden_size,
        "vocab_size": _up_to_multiple(vocab_size, layout.tp),
        "max_position_embeddings": max_position_embeddings,
        "moe_intermediate_size": width("moe_intermediate_size"),
        "num_attention_heads": _HEADS_OF_A_GROUP * groups,
        "o_groups": groups,
        "head_dim": head_dim,
        "qk_rope_head_dim": min(config.qk_rope_head_dim, min(head_dim, index_head_dim) // 2),
        "q_lora_rank": width("q_lora_rank"),
        "o_lora_rank": width("o_lora_rank"),
        "rope_scaling": RopeScaling(
            factor=yarn.factor,
            beta_fast=yarn.beta_fast,
            beta_slow=yarn.beta_slow,
            original_max_position_embeddings=original,
        ),
        "n_routed_experts": _up_to_multiple(max(_FEWEST_EXPERTS, config.num_experts_per_tok), layout.ep),
        "sliding_window": min(config.sliding_window, 16, max_position_embeddings),
        "index_n_heads": 4,
        "index_head_dim": index_head_dim,
        "index_topk": _TOP_K,
        # one more than hold _TOP_K visible entries at worst, where the newest block has a single one
        "candidate_topk_blocks": (_TOP_K + block - 1 + block - 1) // block + 1,
        **_roles(config, num_hidden_layers),
        **changes,
    }
    scaled = ModelConfig.model_validate(fields)
    layout.check(scaled)
    return scaled


def _up_to_multiple(size: int, of: int) -> int:
    return -(-size // of) * of


def _roles(config: ModelConfig, layers: int) -> dict[str, object]:
    """Roles in the proportions of `config`: window layers, half of the rest of ratio 2, half of ratio 1."""
    ratio_1 = layers // 2
    windowed = min(2, layers // 5)
    ratio_2 = layers - ratio_1 - windowed
    first_ratio_1 = layers - ratio_1

    def period(ratio: int) -> int:
        """Layers from one selection to the next, scaled: at least the source and one layer that reuses it."""
        sources = [i for i in config.index_source_layer_ids if config.compress_ratios[i] == ratio]
        share = config.compress_ratios.count(ratio) / max(1, len(sources))
        return max(2, round(share * layers / config.num_hidden_layers))

    kv_sources = tuple(range(windowed, first_ratio_1, period(2)))
    selections = tuple(range(first_ratio_1, layers, period(1)))
    return {
        "num_hidden_layers": layers,
        "compress_ratios": (0,) * windowed + (2,) * ratio_2 + (1,) * ratio_1,
        "kv_source_layer_ids": (*kv_sources, first_ratio_1),
        "index_source_layer_ids": (*kv_sources, *selections),
        "candidate_source_layer_id": first_ratio_1,
    }
