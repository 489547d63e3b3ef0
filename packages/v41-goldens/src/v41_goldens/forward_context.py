"""What the layers of one forward share: the batch, the caches, the RoPE rows and the selections made so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from v41_config import ForwardMetadata, LayerConfig, ModelConfig
from v41_goldens.capture import Capture, layer_key
from v41_goldens.paged_cache import PagedCaches
from v41_goldens.rope_rows import RopeRows

if TYPE_CHECKING:
    from v41_goldens.attention_stages import AttentionStages

DEFAULT_MAX_LOGITS_BYTES = 512 << 20
"""Bytes that index scores in flight may take (model.md section 10)."""


def _goldens() -> AttentionStages:
    from v41_goldens.attention_stages import AttentionStages  # its goldens take a context

    return AttentionStages()


@dataclass
class ForwardContext:
    """State of one forward of one rank.

    `capture` takes copies of intermediate tensors. `injected` replaces some of them, by the same keys, by somebody's
    stored values: what follows then starts from those, so that one difference is found where it arises and not in
    every later layer.

    `topk` holds, per index source, the physical compressed rows `[T, index_topk]` its selection names (-1 padded);
    `candidate_blocks` the candidate source's kept blocks, bool `[T, blocks]`, in request-local positions. `stages` are
    the operators that attention is composed of.
    """

    config: ModelConfig
    metadata: ForwardMetadata[Tensor]
    caches: PagedCaches
    rope: RopeRows
    capture: Capture | None = None
    injected: Mapping[str, Tensor] = field(default_factory=dict)
    max_logits_bytes: int = DEFAULT_MAX_LOGITS_BYTES
    topk: dict[int, Tensor] = field(default_factory=dict)
    candidate_blocks: Tensor | None = None
    stages: AttentionStages = field(default_factory=_goldens)

    def record(self, layer: LayerConfig | None, name: str, tensor: Tensor) -> Tensor:
        """Record a tensor (of one layer, or of the model) and give back what the forward goes on with."""
        if self.capture is None and not self.injected:
            return tensor
        key = name if layer is None else layer_key(layer.layer_id, name)
        if self.capture is not None:
            self.capture.put(key, tensor)
        return self.injected.get(key, tensor)

    def query_rope(self, layer: LayerConfig) -> tuple[Tensor, Tensor]:
        """Rows for queries, window KV and the inverse rotation of the output."""
        return self.rope.rows(layer.rope_profile, self.metadata.position_ids)

    def compressed_rope(self, layer: LayerConfig) -> tuple[Tensor, Tensor]:
        """Rows for what `layer` compresses: position of each group's first token, identity where none closes."""
        return self.rope.rows("compressed", self.metadata.compressed_rope_position_ids[layer.layer_id])
