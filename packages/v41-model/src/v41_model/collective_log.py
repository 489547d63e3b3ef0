"""What a rank sent and received, collective by collective.

Bytes are counted by one rule for every collective: ``bytes_sent`` is the size of what a rank publishes to its group,
``bytes_received`` is the size of what it reads out of the members' publications. A rank's own share counts in both,
as it does on a device where a collective goes through a window in memory: an AllGather of a ``[T_local, D]`` BF16
slab sends ``2 * T_local * D`` bytes and receives ``2 * tp * T_local * D``, a ReduceScatter of FP32 partials sends
and receives ``4 * tp * T_local * D``, an all-reduce sends ``4 * T * D`` and receives ``tp`` times that. Only tensor
payloads count, neither headers nor the handshake. In a row all-to-all a row counts once where it leaves and once
where it arrives, with the route weight and expert id that travel with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["CollectiveKind", "CollectiveLog", "CollectiveRecord", "CollectiveTotal", "Site"]


class CollectiveKind(Enum):
    """The collectives of the sequence-parallel model, each with its own wire format."""

    TOKEN_ALL_GATHER = "token_all_gather"
    TOKEN_REDUCE_SCATTER = "token_reduce_scatter"
    ALL_REDUCE = "all_reduce"
    COUNTS_EXCHANGE = "counts_exchange"
    ROW_ALL_TO_ALL = "row_all_to_all"
    LOGITS_GATHER = "logits_gather"


@dataclass(frozen=True)
class Site:
    """Where in the model a collective is called: the step's name and, inside the backbone, the layer.

    All members of a group must call the same kind of collective from the same site.
    """

    step: str
    layer: int | None = None

    def __str__(self) -> str:
        return self.step if self.layer is None else f"{self.step} (layer {self.layer})"


@dataclass(frozen=True)
class CollectiveRecord:
    """One call of one rank: what it published and what it got, as shapes and bytes.

    ``received`` is the result's shape; of the partials that a sum reads, only ``bytes_received`` tells.
    """

    kind: CollectiveKind
    site: Site
    sent: tuple[tuple[int, ...], ...]
    received: tuple[tuple[int, ...], ...]
    bytes_sent: int
    bytes_received: int
    seconds: float


@dataclass(frozen=True)
class CollectiveTotal:
    """The calls of one kind at one site, summed over all steps since the log was made."""

    calls: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0

    def plus(self, record: CollectiveRecord) -> CollectiveTotal:
        """With one more call."""
        return CollectiveTotal(
            self.calls + 1,
            self.bytes_sent + record.bytes_sent,
            self.bytes_received + record.bytes_received,
            self.seconds + record.seconds,
        )


class CollectiveLog:
    """A rank's account of its collectives: the calls of the current step in order, and running totals.

    The ordered ``records`` are dropped by :meth:`begin_step`, so a session that runs for days does not grow;
    ``totals`` has one entry per (kind, site).
    """

    def __init__(self) -> None:
        self.records: list[CollectiveRecord] = []
        self.totals: dict[tuple[CollectiveKind, Site], CollectiveTotal] = {}

    def begin_step(self) -> None:
        """Forget the ordered records of the step before; the totals stay."""
        self.records.clear()

    def add(self, record: CollectiveRecord) -> None:
        """Append one call and count it."""
        self.records.append(record)
        key = (record.kind, record.site)
        self.totals[key] = self.totals.get(key, CollectiveTotal()).plus(record)

    def of(self, kind: CollectiveKind, step: str | None = None) -> list[CollectiveRecord]:
        """This step's records of one kind, optionally of one named step of the layer, in call order."""
        return [r for r in self.records if r.kind is kind and step in (None, r.site.step)]

    def sequence(self) -> list[tuple[CollectiveKind, Site]]:
        """This step's calls in order, without their sizes: what has to be equal on all members of a group."""
        return [(r.kind, r.site) for r in self.records]
