"""What a step should send and receive, from shapes alone: the counterpart of what a collective log has measured.

Bytes are counted as :mod:`v41_model.collective_log` says. For the attention boundary of one layer they come to
``D * (2 * T_local + 2 * T + 8 * T)`` per rank in the sharded wiring and to ``D * 4 * (1 + tp) * T`` in the replicated
one: at T = 192, D = 5120, TP4 about 10.3 MB against 19.7 MB.
"""

from __future__ import annotations

from dataclasses import dataclass

from v41_config import ModelConfig, TokenMapping
from v41_model.wiring import Wiring

__all__ = ["ATTENTION_BOUNDARY", "OUTSIDE_LAYERS", "Traffic", "expected_traffic", "half_layer_bytes"]

_BF16, _FP32, _INT32, _INT64 = 2, 4, 4, 8

ATTENTION_BOUNDARY = ("attention input", "attention output")
"""The sites of a layer's crossings around attention: half a layer's TP traffic."""

OUTSIDE_LAYERS = ("embedding", "final hidden", "logits")
"""The sites of entry and exit, called once in a step; all others are called once in a layer."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of one rank's calls at one site."""

    sent: int
    received: int

    @property
    def bytes(self) -> int:
        """Both directions."""
        return self.sent + self.received


def expected_traffic(
    config: ModelConfig,
    mapping: TokenMapping,
    rank: int,
    wiring: Wiring,
    *,
    logit_rows: int,
    received_routes: int,
    vocabulary_shards: bool = True,
) -> dict[str, Traffic]:
    """One call of every site of a step, by the site's name.

    ``mapping`` are the group's tokens; ``logit_rows`` the rows that get logits; ``received_routes`` the routes that
    chose experts of this rank, which only the router knows. ``vocabulary_shards`` says that the embedding is one.
    """
    layout, width = mapping.layout, config.hidden_size
    routes = mapping.active_rows(rank) * config.num_experts_per_tok
    routed_row = _BF16 * width + _FP32 + _INT32  # with its route weight and expert id
    counts = Traffic(_INT64 * layout.ep, _INT64 * layout.ep)
    expected = {
        "expert counts": counts,
        "expert dispatch": Traffic(routes * routed_row, received_routes * routed_row),
        "expert combine": Traffic(received_routes * _BF16 * width, routes * _BF16 * width),
    }
    if mapping.active == 0:
        return expected
    slab = _BF16 * mapping.slab_rows * width
    gather = Traffic(slab, layout.tp * slab)
    if wiring is Wiring.SHARDED:
        partials = _FP32 * mapping.padded_rows * width
        reduce = Traffic(partials, partials)
        expected |= {"attention input": gather, "final hidden": gather}
    else:
        partials = _FP32 * mapping.capacity * width
        reduce = Traffic(partials, layout.tp * partials)
        expected |= {"MoE output": gather}
    logits = _FP32 * logit_rows * config.vocab_size
    expected |= {"attention output": reduce, "logits": Traffic(logits // layout.tp, logits)}
    return expected | ({"embedding": reduce} if vocabulary_shards else {})


def half_layer_bytes(config: ModelConfig, mapping: TokenMapping, rank: int, wiring: Wiring) -> int:
    """Bytes of one rank's TP boundary around the attention of one layer, both directions."""
    expected = expected_traffic(config, mapping, rank, wiring, logit_rows=0, received_routes=0)
    return sum(expected[site].bytes for site in ATTENTION_BOUNDARY if site in expected)
