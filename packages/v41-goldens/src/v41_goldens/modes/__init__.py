"""One module per attention mode; prefill, chunked prefill and decode of a mode are one function."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from v41_config import AttentionMode
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

ATTENTION_ENTRIES: dict[str, Callable[..., Tensor]] = {
    f"{phase}_attn_{mode.value}": attention for phase in ("prefill", "decode") for mode, attention in ATTENTION.items()
}
"""The twelve entries by operator name."""
