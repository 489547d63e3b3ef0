"""Which share of a model's weights a kernel is judged on, which follows from the operator's contract."""

from __future__ import annotations

import pytest

from v41_config import AttentionMode
from v41_model.kernel_verification import named_cases

MODES = [f"{phase}_{{}}{mode.value}" for phase in ("prefill", "decode") for mode in AttentionMode]

OF_FLASH = {
    "flash": ("rms_norm", "q_proj_qr", "kv_proj_rope", "sparse_attention", "lm_head", "embed", "shared_expert"),
    "flash, rank 7 of 8": (
        *("q_proj_rope", "qkv_proj_rope", "grouped_output", "o_proj"),
        *(mode.format("attn_") for mode in MODES),
    ),
    "flash, 8 heads": (*(mode.format("") for mode in MODES), *(f"{mode.format('')}_sharded" for mode in MODES)),
    "flash, 4 experts, rank 1 of 2": ("routed_experts",),
    "flash, 2 experts": ("moe",),
}


@pytest.mark.parametrize(("share", "name"), [(share, name) for share, names in OF_FLASH.items() for name in names])
def test_weights_of_the_released_dimensions_are_judged_by_shares(share: str, name: str) -> None:
    assert {label.split(" ", 2)[2] for label, _ in named_cases(name, "flash")} == {share}


@pytest.mark.parametrize("name", ["o_proj", "decode_attn_swa", "prefill_c1a_full", "moe"])
def test_small_models_are_judged_whole(name: str) -> None:
    assert {label.split(" ", 2)[2] for label, _ in named_cases(name, "tiny")} == {"tiny"}
