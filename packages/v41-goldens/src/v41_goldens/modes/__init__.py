"""One module per attention mode; prefill, chunked prefill and decode of a mode are one function."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from v41_config import AttentionMode, LayerConfig, ModelConfig
from v41_goldens.errors import OperandError
from v41_goldens.modes.c1a_full import attn_c1a_full
from v41_goldens.modes.c1a_reindex import attn_c1a_reindex
from v41_goldens.modes.c1a_reuse import attn_c1a_reuse
from v41_goldens.modes.c2a_full import attn_c2a_full
from v41_goldens.modes.c2a_reuse import attn_c2a_reuse
from v41_goldens.modes.swa import attn_swa

ATTENTION: dict[AttentionMode, Callable[..., Tensor]] = {
    AttentionMode.SWA: attn_swa,
    AttentionMode.C2A_FULL: attn_c2a_full,
    AttentionMode.C2A_REUSE: attn_c2a_reuse,
    AttentionMode.C1A_FULL: attn_c1a_full,
    AttentionMode.C1A_REINDEX: attn_c1a_reindex,
    AttentionMode.C1A_REUSE: attn_c1a_reuse,
}
"""The attention of each mode."""


def first_layer(config: ModelConfig, mode: AttentionMode, where: str) -> LayerConfig:
    """The first layer of a mode, for whom it does not matter which one it is; `where` is its place in an error.

    Raises:
        OperandError: the model has no such layer.
    """
    for layer in config.layers:
        if layer.mode is mode:
            return layer
    raise OperandError(where, f"a model without {mode.title}", f"a model with {mode.title} layers")


ATTENTION_ENTRIES: dict[str, Callable[..., Tensor]] = {
    f"{phase}_attn_{mode.value}": attention for phase in ("prefill", "decode") for mode, attention in ATTENTION.items()
}
"""The twelve entries by operator name."""
