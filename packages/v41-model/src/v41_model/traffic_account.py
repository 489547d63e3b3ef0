"""A measured step site by site, each call beside the formula."""

from __future__ import annotations

from dataclasses import dataclass

from v41_model.collective_log import CollectiveRecord
from v41_model.traffic_formula import OUTSIDE_LAYERS, Traffic, expected_traffic
from v41_model.traffic_run import MeasuredStep, TrafficModel

__all__ = ["SiteAccount", "site_accounts"]


@dataclass(frozen=True)
class SiteAccount:
    """One site of a step: ``calls`` of each rank, the bytes of all of them together, and the mean rank's seconds.

    ``fewest`` and ``most`` are those of two ranks, where routing makes ranks differ. ``agrees`` says that every call
    of every rank moved what the formula says, and that no other calls were made.
    """

    site: str
    kind: str
    calls: int
    fewest: Traffic
    most: Traffic
    agrees: bool
    seconds: float


def site_accounts(model: TrafficModel, step: MeasuredStep) -> list[SiteAccount]:
    """The account of every site, in the order of the first rank's calls, then of sites that should have been called."""
    expected = [_expected(model, step, rank.rank) for rank in step.ranks]
    sites = dict.fromkeys(r.site.step for rank in step.ranks for r in rank.records)
    sites |= dict.fromkeys(site for calls in expected for site in calls)
    return [_account(step, site, [calls.get(site, []) for calls in expected]) for site in sites]


def _account(step: MeasuredStep, site: str, expected: list[list[Traffic]]) -> SiteAccount:
    records = [[r for r in rank.records if r.site.step == site] for rank in step.ranks]
    measured = [[_traffic(r) for r in calls] for calls in records]
    totals = [Traffic(sum(t.sent for t in calls), sum(t.received for t in calls)) for calls in measured]
    kinds = {r.kind.value for calls in records for r in calls}
    return SiteAccount(
        site,
        kind=" ".join(sorted(kinds)) or "none",
        calls=max(map(len, records)),
        fewest=min(totals, key=lambda t: t.bytes),
        most=max(totals, key=lambda t: t.bytes),
        agrees=measured == expected,
        seconds=sum(r.seconds for calls in records for r in calls) / len(records),
    )


def _traffic(record: CollectiveRecord) -> Traffic:
    return Traffic(record.bytes_sent, record.bytes_received)


def _expected(model: TrafficModel, step: MeasuredStep, rank: int) -> dict[str, list[Traffic]]:
    """What the formula says of every call of a rank, by site, in order."""
    layout = step.groups[0].mapping.layout
    mapping = step.groups[layout.dp_rank(rank)].mapping
    table_rows = len(next(iter(model.ranks.values())).weights.embed)

    def one_layer(received_routes: int) -> dict[str, Traffic]:
        return expected_traffic(
            model.config,
            mapping,
            rank,
            step.wiring,
            logit_rows=step.shape.logit_rows,
            received_routes=received_routes,
            vocabulary_shards=table_rows < model.config.vocab_size,
        )

    layers = [one_layer(received) for received in step.ranks[rank].received_routes]
    return {site: [t] if site in OUTSIDE_LAYERS else [layer[site] for layer in layers] for site, t in layers[0].items()}
