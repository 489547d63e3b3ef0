"""``v41-model traffic``: the bytes and the time of every collective of a step, in both wirings, beside the formula."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from v41_config import ParallelLayout
from v41_model.atomic_file import atomic_file, require_writable
from v41_model.command_options import (
    Subparsers,
    add_layout_options,
    opened_weights,
    set_threads,
)
from v41_model.traffic_account import SiteAccount, site_accounts
from v41_model.traffic_formula import ATTENTION_BOUNDARY, half_layer_bytes
from v41_model.traffic_run import STEPS, MeasuredStep, StepShape, TrafficModel, flash_at_two_layers, measure_step
from v41_model.wiring import Wiring
from v41_model.world_options import opened_world

__all__ = ["add_traffic_command", "write_records"]


def add_traffic_command(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser("traffic", help="measure what the collectives of a step move, in both wirings")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="run this whole model (default: FLASH's dimensions, two layers, transport alone with random rows)",
    )
    parser.add_argument("--without-engram", action="store_true", help="as in the other commands")
    add_layout_options(parser, tp=4, dp=2)
    parser.add_argument(
        "--steps",
        nargs="+",
        choices=tuple(STEPS),
        default=list(STEPS),
        help="which steps (default all)",
    )
    parser.add_argument("--records", type=Path, metavar="FILE.csv", help="write every call of every rank and layer")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """One table per step and wiring; 1 when a measured byte differs from the formula."""
    layout = ParallelLayout(arguments.tp, arguments.dp)
    set_threads(arguments)
    if arguments.records is not None:
        require_writable(arguments.records)
    measured: dict[str, list[MeasuredStep]] = {}
    with opened_world(arguments, layout) as world:
        if arguments.checkpoint is None:
            model = TrafficModel.transport(flash_at_two_layers(), layout, world.local_ranks)
        else:
            with opened_weights(arguments) as checkpoint:
                model = TrafficModel.open(checkpoint, layout, world.local_ranks)
        for line in _preamble(model, layout, type(world).__name__):
            print(line)
        agree = True
        for name in arguments.steps:
            steps = measured[name] = [measure_step(world, model, STEPS[name], wiring) for wiring in Wiring]
            accounts = [site_accounts(model, step) for step in steps]
            for line in _report(name, STEPS[name], model, steps, accounts):
                print(line, flush=True)
            agree &= all(account.agrees for sites in accounts for account in sites)
        if arguments.records is not None and 0 in world.local_ranks:
            write_records(arguments.records, measured)
    print("measured bytes equal the formula" if agree else "MEASURED BYTES DIFFER FROM THE FORMULA")
    return 0 if agree else 1


def _preamble(model: TrafficModel, layout: ParallelLayout, world: str) -> Iterator[str]:
    what = "the whole model" if model.real else "transport alone: the model's rank code on random rows, no arithmetic"
    yield f"TP{layout.tp} DP{layout.dp} EP{layout.ep}, D = {model.config.hidden_size}, {world}; {what}."
    yield "Bytes are from the collective logs. Times are of this machine's CPU and say nothing about a device."


def _report(
    name: str,
    shape: StepShape,
    model: TrafficModel,
    steps: Sequence[MeasuredStep],
    accounts: Sequence[Sequence[SiteAccount]],
) -> Iterator[str]:
    yield ""
    yield f"{name}: {shape.requests} requests of {shape.rows} rows in each DP group, T = {shape.group_rows}"
    mapping = steps[0].groups[0].mapping
    for step, sites in zip(steps, accounts, strict=True):
        yield f"  {step.wiring.value}: step of all ranks {step.seconds:.3f} s"
        header = ("site", "collective", "calls", "sent B/call", "received B/call", "formula", "ms/call")
        yield "    {:18}{:22}{:>6}{:>24}{:>24}{:>9}{:>10}".format(*header)
        for account in sites:
            sent, received = (
                _span(getattr(account.fewest, way) // account.calls, getattr(account.most, way) // account.calls)
                for way in ("sent", "received")
            )
            formula = "equal" if account.agrees else "DIFFERS"
            milliseconds = 1000 * account.seconds / account.calls
            yield (
                f"    {account.site:18}{account.kind:22}{account.calls:6}{sent:>24}{received:>24}"
                f"{formula:>9}{milliseconds:10.3f}"
            )
        crossings = [r for r in step.ranks[0].records if r.site.step in ATTENTION_BOUNDARY and r.site.layer == 0]
        boundary = sum(r.bytes_sent + r.bytes_received for r in crossings)
        formula_bytes = half_layer_bytes(model.config, mapping, 0, step.wiring)
        yield (
            f"    attention boundary of one layer, rank 0: {boundary / 1e6:.2f} MB measured, "
            f"{formula_bytes / 1e6:.2f} MB by the formula"
        )


def _span(fewest: int, most: int) -> str:
    return f"{fewest:,}" if fewest == most else f"{fewest:,}..{most:,}"


def write_records(path: Path, measured: dict[str, list[MeasuredStep]]) -> None:
    """A line per call: step, wiring, rank, layer, site, collective, bytes sent and received, seconds.

    Errors: :class:`v41_model.errors.OutputError`.
    """
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(("step", "wiring", "rank", "layer", "site", "collective", "sent", "received", "seconds"))
    for name, steps in measured.items():
        for step in steps:
            for rank in step.ranks:
                for r in rank.records:
                    layer = "" if r.site.layer is None else r.site.layer
                    place = (name, step.wiring.value, rank.rank, layer, r.site.step, r.kind.value)
                    lines.writerow((*place, r.bytes_sent, r.bytes_received, f"{r.seconds:.6f}"))
    with atomic_file(path) as temporary:
        temporary.write_text(text.getvalue())
