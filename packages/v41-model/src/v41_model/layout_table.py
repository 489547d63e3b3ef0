"""The sequence-parallel layer as a table: what each step of one rank took, gave and moved, observed in a run.

Nothing is computed from the layout: shapes come from the operators' arguments and results, bytes from the rank's
collective log.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from v41_config import LayerConfig
from v41_model.collective_log import CollectiveLog, CollectiveRecord
from v41_model.operators import Operators
from v41_model.world import World

__all__ = ["LayoutRow", "OperatorCall", "OperatorTrace", "format_layout_table", "layout_rows"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class OperatorCall:
    """One call of one rank: the operator, the shapes of its tensor arguments and of its results."""

    operator: str
    layer: int | None
    arguments: tuple[Shape, ...]
    results: tuple[Shape, ...]


@dataclass
class OperatorTrace:
    """The operator calls of every rank of a world, in order."""

    world: World
    calls: dict[int, list[OperatorCall]] = field(default_factory=lambda: defaultdict(list))

    def observe(self, operators: Operators) -> Operators:
        """The same operators, each noting its calls here."""
        return operators.replace(**{name: self._noting(name, getattr(operators, name)) for name in Operators.names()})

    def _noting(self, name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            results = operator(*arguments)
            rank = self.world.current_rank
            if rank is not None:
                layers = [a.layer_id for a in arguments if isinstance(a, LayerConfig)]
                shapes = tuple(_shapes(arguments)), tuple(_shapes(results))
                self.calls[rank].append(OperatorCall(name, layers[0] if layers else None, *shapes))
            return results

        return call

    def of_layer(self, rank: int, layer: int) -> list[OperatorCall]:
        """A rank's calls of one layer: from its two mixes to the next layer's."""
        starts = [i for i, call in enumerate(self.calls[rank]) if call.operator == "mhc_mixes"]
        bounds = [*starts[::2], len(self.calls[rank])]
        return self.calls[rank][bounds[layer] : bounds[layer + 1]]


def _shapes(values: Any) -> Iterator[Shape]:
    for value in values if isinstance(values, tuple) else (values,):
        if isinstance(value, Tensor):
            yield tuple(value.shape)


@dataclass(frozen=True)
class LayoutRow:
    """One step of the layer on one rank."""

    step: str
    takes: str
    gives: str
    collective: CollectiveRecord | None = None


def layout_rows(
    calls: Sequence[OperatorCall], log: CollectiveLog, layer: int, heads: dict[str, Shape]
) -> list[LayoutRow]:
    """The rows of one rank's layer in the order of the data flow.

    ``calls`` are the rank's of that layer, ``log`` holds the step's collectives, ``heads`` the shapes of the rank's
    captured ``q`` and ``sparse_attn_out``.
    """
    by_name: dict[str, list[OperatorCall]] = defaultdict(list)
    for call in calls:
        by_name["attention" if call.operator.startswith("attn_") else call.operator].append(call)
    moved = {r.site.step: r for r in log.records if r.site.layer == layer}
    attn_mix, _ = by_name["mhc_mixes"]
    attn_norm, ffn_norm = by_name["rms_norm"][:2]
    attn_post, ffn_post = by_name["mhc_post"]
    (attention,), (gate,), (experts,) = by_name["attention"], by_name["gate"], by_name["routed_experts"]
    (shared,), (combine,) = by_name["shared_expert"], by_name["combine"]
    gather, scatter = moved["attention input"], moved["attention output"]
    send, back = moved["expert dispatch"], moved["expert combine"]
    counts = moved["expert counts"]
    ids, route_weights, scores = map(_s, gate.results)
    kept = ", ".join(map(_s, attn_post.arguments[1:]))
    return [
        LayoutRow("1  residual streams enter", _s(attn_mix.arguments[0]), _s(attn_mix.arguments[0])),
        LayoutRow("2  mHC-pre + norm", _s(attn_mix.arguments[0]), _s(attn_norm.results[0])),
        LayoutRow("   TP AllGather", _s(gather.sent[0]), _s(gather.received[0]), gather),
        LayoutRow("3  Q projection, own heads", _s(attention.arguments[0]), _s(heads["q"])),
        LayoutRow("4  attention", _s(heads["q"]), _s(heads["sparse_attn_out"])),
        LayoutRow("5  grouped output, partial", _s(heads["sparse_attn_out"]), _s(attention.results[0])),
        LayoutRow("6  TP ReduceScatter (SUM)", _s(scatter.sent[0]), _s(scatter.received[0]), scatter),
        LayoutRow("7  own residual, post, mix", kept, kept),
        LayoutRow("8  attention mHC-post", _s(attn_post.arguments[0]), _s(attn_post.results[0])),
        LayoutRow("9  MoE mHC-pre + norm", _s(attn_post.results[0]), _s(ffn_norm.results[0])),
        LayoutRow("10 gate / top-k", _s(gate.arguments[0]), f"{scores}; {ids}, {route_weights}"),
        LayoutRow("   EP counts exchange", _s(counts.sent[0]), _s(counts.received[0]), counts),
        LayoutRow("11 EP dispatch", _s(send.sent[0]), _s(send.received[0]), send),
        LayoutRow("12 local routed experts", _s(experts.arguments[0]), _s(experts.results[0])),
        LayoutRow("   EP return to the source", _s(back.sent[0]), _s(back.received[0]), back),
        LayoutRow("13 EP combine", _s(combine.arguments[0]), _s(combine.results[0])),
        LayoutRow("14 shared expert", _s(shared.arguments[0]), _s(shared.results[0])),
        LayoutRow("15 routed + shared", _s(combine.arguments[2]), _s(combine.results[0])),
        LayoutRow("16 MoE mHC-post", _s(ffn_post.arguments[0]), _s(ffn_post.results[0])),
        LayoutRow("17 streams to the next layer", _s(ffn_post.results[0]), _s(ffn_post.results[0])),
    ]


def format_layout_table(rows: Sequence[LayoutRow]) -> str:
    """Step, shape taken, shape given, collective, bytes sent and received."""
    lines = [("step", "takes", "gives", "collective", "sent B", "received B")]
    for row in rows:
        moved = ("-", "0", "0")
        if row.collective is not None:
            sent, received = row.collective.bytes_sent, row.collective.bytes_received
            moved = (row.collective.kind.value, f"{sent:,}", f"{received:,}")
        lines.append((row.step, row.takes, row.gives, *moved))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    words = "  ".join(f"{{:<{width}}}" for width in widths[:4])
    numbers = "  ".join(f"{{:>{width}}}" for width in widths[4:])
    return "\n".join(f"{words}  {numbers}".format(*line) for line in lines)


def _s(shape: Shape) -> str:
    return str(list(shape)).replace(" ", "")
