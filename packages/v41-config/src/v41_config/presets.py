"""The presets: the release, its structure at toy size, its dimensions at toy depth, and a toy for eight ranks."""

from __future__ import annotations

from v41_config.model_config import DraftingConfig, EngramConfig, ModelConfig, RopeScaling, VisionConfig
from v41_config.parallel_layout import ParallelLayout

FLASH = ModelConfig(
    vocab_size=129280,
    hidden_size=5120,
    moe_intermediate_size=2304,
    num_hidden_layers=40,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1280,
    o_lora_rank=1024,
    o_groups=8,
    swiglu_limit=10.0,
    rms_norm_eps=1e-20,
    max_position_embeddings=1048576,
    rope_theta=10000,
    rope_scaling=RopeScaling(factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536),
    compress_rope_theta=160000,
    n_routed_experts=384,
    num_experts_per_tok=6,
    routed_scaling_factor=1.5,
    sliding_window=128,
    compress_ratios=(0,) * 2 + (2,) * 18 + (1,) * 20,
    kv_source_layer_ids=(2, 8, 14, 20),
    index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
    index_n_heads=32,
    index_head_dim=128,
    index_topk=512,
    candidate_source_layer_id=20,
    candidate_topk_blocks=2048,
    candidate_block_size=8,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    image_token_id=129264,
    engram=EngramConfig(
        layer_ids=(1, 14),
        num_embeddings=(384006168, 384016682),
        max_ngram_size=4,
        vocab_size=16000000,
        n_heads=8,
        head_dim=256,
        pad_token_id=2,
        compressed_vocab_size=99092,
    ),
    drafting=DraftingConfig(
        num_nextn_predict_layers=3,
        block_size=5,
        noise_token_id=128799,
        target_layer_ids=(37, 38, 39),
        markov_rank=256,
        n_routed_experts=128,
        num_experts_per_tok=3,
    ),
    vision=VisionConfig(
        num_hidden_layers=32,
        hidden_size=1024,
        num_attention_heads=16,
        intermediate_size=2816,
        patch_size=14,
        rope_theta=10000,
        downsample_ratio=3,
        max_image_tokens=1024,
        min_pixels=295936,
    ),
)
"""The released DeepSeek-V4.1-Flash."""

_TEXT_ONLY = {"image_token_id": None, "engram": None, "drafting": None, "vision": None}


def _derived(**changes: object) -> ModelConfig:
    return ModelConfig.model_validate({**{f: getattr(FLASH, f) for f in ModelConfig.model_fields}, **changes})


FLASH6 = _derived(
    **_TEXT_ONLY,
    vocab_size=2048,
    num_hidden_layers=6,
    n_routed_experts=8,
    compress_ratios=(0, 2, 2, 1, 1, 1),
    kv_source_layer_ids=(1, 3),
    index_source_layer_ids=(1, 3, 4),
    candidate_source_layer_id=3,
)
"""FLASH's dimensions with one layer of each mode, eight experts and a small vocabulary."""

TINY = _derived(
    **_TEXT_ONLY,
    vocab_size=512,
    hidden_size=256,
    moe_intermediate_size=64,
    num_hidden_layers=10,
    num_attention_heads=8,
    head_dim=64,
    qk_rope_head_dim=32,
    q_lora_rank=64,
    o_lora_rank=32,
    o_groups=4,
    max_position_embeddings=4096,
    rope_scaling=RopeScaling(factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=64),
    n_routed_experts=16,
    num_experts_per_tok=4,
    sliding_window=16,
    compress_ratios=(0, 0, 2, 2, 2, 2, 1, 1, 1, 1),
    kv_source_layer_ids=(2, 4, 6),
    index_source_layer_ids=(2, 4, 6, 8),
    index_n_heads=4,
    index_head_dim=64,
    index_topk=16,
    candidate_source_layer_id=6,
    candidate_topk_blocks=4,
)
"""FLASH's structure at toy size."""

TINY8 = FLASH.scaled(layout=ParallelLayout(tp=8))
"""A toy that every layout of up to eight ranks divides: TP8, EP8 and all between."""

PRESETS = {"flash": FLASH, "flash6": FLASH6, "tiny": TINY, "tiny8": TINY8}
"""Presets by the name that commands take."""
