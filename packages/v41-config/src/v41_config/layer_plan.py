"""What each layer is: its attention mode and the layers whose cache and selections it reads (model.md section 1)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

RopeProfile = Literal["swa", "compressed"]


class AttentionMode(Enum):
    """The six attention modes; the value is the stem of the operator names (`decode_attn_c2a_full`, ...)."""

    SWA = "swa"
    C2A_FULL = "c2a_full"
    C2A_REUSE = "c2a_reuse"
    C1A_FULL = "c1a_full"
    C1A_REINDEX = "c1a_reindex"
    C1A_REUSE = "c1a_reuse"

    @property
    def title(self) -> str:
        """The mode as the documents write it, e.g. ``C2A Full``."""
        stem, _, kind = self.value.partition("_")
        return f"{stem.upper()} {kind.capitalize()}".strip()


@dataclass(frozen=True)
class LayerConfig:
    """The role of one layer.

    `kv_source` owns the compressed KV and index keys this layer reads, `index_source` the top-k selection it
    attends to, `candidate_source` the candidate mask that restricts its own scores; None where there is none.
    """

    layer_id: int
    mode: AttentionMode
    compress_ratio: int
    kv_source: int | None
    index_source: int | None
    candidate_source: int | None
    makes_candidates: bool
    rope_profile: RopeProfile

    @property
    def owns_kv(self) -> bool:
        """Whether this layer compresses: publishes compressed KV and index keys."""
        return self.kv_source == self.layer_id

    @property
    def owns_index(self) -> bool:
        """Whether this layer scores keys and publishes a selection."""
        return self.index_source == self.layer_id


def attention_mode(compress_ratio: int, owns_kv: bool, owns_index: bool) -> AttentionMode | None:
    """The mode of a layer, or None where the model has no such mode."""
    if compress_ratio == 0:
        return None if owns_kv or owns_index else AttentionMode.SWA
    return {
        (2, True, True): AttentionMode.C2A_FULL,
        (2, False, False): AttentionMode.C2A_REUSE,
        (1, True, True): AttentionMode.C1A_FULL,
        (1, False, True): AttentionMode.C1A_REINDEX,
        (1, False, False): AttentionMode.C1A_REUSE,
    }.get((compress_ratio, owns_kv, owns_index))
