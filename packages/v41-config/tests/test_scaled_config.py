"""Small presets: consistent whatever is asked for, every mode in them, divisible by the layout."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from v41_config import FLASH, TINY, TINY8, AttentionMode, ConfigError, LayoutError, ModelConfig, ParallelLayout


@settings(deadline=None)
@given(
    hidden_size=st.integers(1, 40).map(lambda n: 32 * n),
    num_hidden_layers=st.integers(6, 48),
    vocab_size=st.integers(3, 2000),
    max_position_embeddings=st.integers(1, 1 << 20),
    tp=st.integers(1, 8),
    dp=st.integers(1, 8),
)
def test_any_size_gives_a_consistent_model_of_all_modes(
    hidden_size: int, num_hidden_layers: int, vocab_size: int, max_position_embeddings: int, tp: int, dp: int
) -> None:
    layout = ParallelLayout(tp, dp)
    config = FLASH.scaled(
        hidden_size=hidden_size,
        num_hidden_layers=num_hidden_layers,
        vocab_size=vocab_size,
        max_position_embeddings=max_position_embeddings,
        layout=layout,
    )
    assert (config.hidden_size, config.num_hidden_layers) == (hidden_size, num_hidden_layers)
    assert vocab_size <= config.vocab_size < vocab_size + tp
    assert {layer.mode for layer in config.layers} == set(AttentionMode)
    layout.check(config)
    assert config.qk_rope_head_dim < min(config.head_dim, config.index_head_dim)
    assert (config.engram, config.drafting, config.vision) == (None, None, None)
    assert ModelConfig.model_validate(config.model_dump()) == config


def test_flash_at_its_own_size_keeps_its_roles_and_widths() -> None:
    own = FLASH.scaled(
        hidden_size=5120, num_hidden_layers=40, vocab_size=129280, max_position_embeddings=1048576
    )  # fmt: skip
    for field in ("compress_ratios", "kv_source_layer_ids", "index_source_layer_ids", "candidate_source_layer_id",
                  "moe_intermediate_size", "head_dim", "qk_rope_head_dim", "q_lora_rank", "o_lora_rank",
                  "index_head_dim", "rope_scaling", "hc_mult", "rms_norm_eps"):  # fmt: skip
        assert getattr(own, field) == getattr(FLASH, field), field


def test_ten_layers_are_dealt_out_in_the_proportions_of_forty() -> None:
    config = FLASH.scaled(num_hidden_layers=10)
    assert config.compress_ratios == (0, 0, 2, 2, 2, 1, 1, 1, 1, 1)
    assert config.kv_source_layer_ids == (2, 4, 5)
    assert config.index_source_layer_ids == (2, 4, 5, 7, 9)
    assert config.candidate_source_layer_id == 5


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_tiny8_divides_for_every_layout_of_eight_ranks(tp: int) -> None:
    for dp in (1, 2, 4, 8):
        if tp * dp <= 8:
            layout = ParallelLayout(tp, dp)
            layout.check(TINY8)
            assert len(layout.expert_range(TINY8, 0)) * layout.ep == TINY8.n_routed_experts
    with pytest.raises(LayoutError):
        ParallelLayout(8).check(TINY)  # which is why there is another


def test_rules_hold_at_the_top_k() -> None:
    blocks, size = TINY8.candidate_topk_blocks, TINY8.candidate_block_size
    assert blocks * size - (size - 1) >= TINY8.index_topk
    with pytest.raises(ConfigError, match="candidate_topk_blocks"):
        TINY8.scaled(index_topk=blocks * size)


def test_a_scaled_model_can_be_scaled_again() -> None:
    assert {layer.mode for layer in TINY.scaled(num_hidden_layers=7).layers} == set(AttentionMode)
    assert TINY8.scaled(layout=ParallelLayout(tp=8)).o_groups == 8


def test_fields_can_be_set_besides() -> None:
    config = FLASH.scaled(n_routed_experts=32, swiglu_limit=7.0)
    assert (config.n_routed_experts, config.swiglu_limit) == (32, 7.0)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 5}, "num_hidden_layers"),
    ({"hidden_size": 33}, "hidden_size"),
    ({"hidden_size": 0}, "hidden_size"),
    ({"vocab_size": 2}, "pad_token_id"),
    ({"max_position_embeddings": 0}, "max_position_embeddings"),
    ({"n_group": 8}, "n_group"),
    ({"o_groups": 3}, "o_groups"),
]


@pytest.mark.parametrize(("changes", "field"), WRONG)
def test_nonsense_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FLASH.scaled(**changes)
    assert caught.value.where == field


def test_changes_that_the_layout_does_not_divide_are_refused() -> None:
    with pytest.raises(LayoutError, match="n_routed_experts = 18"):
        FLASH.scaled(layout=ParallelLayout(4, 2), n_routed_experts=18)
