"""The operators that rank code calls, by name: goldens by default, any of them replaced.

Rank code never imports an operator; it calls the table it was given, so that a single leaf can be exchanged inside
the running model and everything behind it compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from v41_config import AttentionMode, ConfigError
from v41_config.similar_names import did_you_mean
from v41_goldens.attention_stages import AttentionStages
from v41_goldens.block import entry_streams
from v41_goldens.embedding import embedded_partial
from v41_goldens.experts import routed_experts, shared_expert
from v41_goldens.gate import GateOutput, gate
from v41_goldens.hyper_connections import mhc_mixes, mhc_post, mhc_pre
from v41_goldens.linear import fp32_linear
from v41_goldens.modes.c1a_full import attn_c1a_full
from v41_goldens.modes.c1a_reindex import attn_c1a_reindex
from v41_goldens.modes.c1a_reuse import attn_c1a_reuse
from v41_goldens.modes.c2a_full import attn_c2a_full
from v41_goldens.modes.c2a_reuse import attn_c2a_reuse
from v41_goldens.modes.swa import attn_swa
from v41_goldens.moe import combine
from v41_goldens.rms_norm import rms_norm
from v41_goldens.rope import materialize_rope_rows

__all__ = ["Operators"]

Golden = TypeVar("Golden", bound=Callable[..., Any])


@dataclass(frozen=True)
class Operators(AttentionStages):
    """One callable per operator, with the golden's signature and contract (see the golden of that name).

    The ``attn_*`` operators take ``(context, layer, weights, x [T, D])`` with the rows of the whole group and give
    this rank's FP32 output partial ``[T, D]``; they are composed of the attention stages, which are part of this
    table. All others are row-wise.
    """

    embed: Callable[[Tensor, Tensor, int, int], Tensor] = embedded_partial
    input_pack: Callable[[Tensor, int], tuple[Tensor, Tensor]] = entry_streams
    materialize_rope_rows: Callable[..., tuple[Tensor, Tensor]] = materialize_rope_rows
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    mhc_mixes: Callable[..., tuple[Tensor, Tensor, Tensor]] = mhc_mixes
    mhc_pre: Callable[[Tensor, Tensor], Tensor] = mhc_pre
    mhc_post: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = mhc_post
    hc_head: Callable[[Tensor, Tensor], Tensor] = mhc_pre
    gate: Callable[..., GateOutput] = gate
    routed_experts: Callable[..., Tensor] = routed_experts
    shared_expert: Callable[..., Tensor] = shared_expert
    combine: Callable[[Tensor, Tensor, Tensor], Tensor] = combine
    fp32_linear: Callable[[Tensor, Tensor], Tensor] = fp32_linear
    attn_swa: Callable[..., Tensor] = attn_swa
    attn_c2a_full: Callable[..., Tensor] = attn_c2a_full
    attn_c2a_reuse: Callable[..., Tensor] = attn_c2a_reuse
    attn_c1a_full: Callable[..., Tensor] = attn_c1a_full
    attn_c1a_reindex: Callable[..., Tensor] = attn_c1a_reindex
    attn_c1a_reuse: Callable[..., Tensor] = attn_c1a_reuse

    @staticmethod
    def names() -> tuple[str, ...]:
        """The operators that can be replaced."""
        return tuple(field.name for field in dataclasses.fields(Operators))

    def at(self, layer: int | None) -> Operators:
        """The table of one layer, or of entry and exit (None): here the same for all."""
        return self

    def around(self, golden: Golden) -> Golden:
        """What runs in the place of a function that is no entry: pieces made of entries, and the choice of tokens.

        Here that is the function itself.
        """
        return golden

    def replace(self, **operators: Callable[..., Any]) -> Operators:
        """This table with some operators exchanged. Errors: :class:`v41_config.ConfigError` for an unknown name."""
        for name in operators:
            if name not in self.names():
                meant = did_you_mean(name, self.names())
                raise ConfigError("Operators.replace", name, f"one of {', '.join(self.names())}{meant}")
        return dataclasses.replace(self, **operators)

    def attention(self, mode: AttentionMode) -> Callable[..., Tensor]:
        """The attention operator of a mode."""
        operator: Callable[..., Tensor] = getattr(self, f"attn_{mode.value}")
        return operator
