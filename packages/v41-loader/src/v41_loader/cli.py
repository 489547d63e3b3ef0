"""`v41-loader`: commands on checkpoint directories."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from v41_config.command_line import run_command
from v41_config.presets import PRESETS
from v41_loader.errors import SynthesisError
from v41_loader.inventory import read_inventory
from v41_loader.progress_bar import byte_bar
from v41_loader.sharding.command_options import add_json_option
from v41_loader.sharding.commands import add_shard_commands
from v41_loader.sharding.plan_command import add_plan_command
from v41_loader.synth import (
    DEFAULT_SHARDS,
    SynthesisReport,
    synthesize_checkpoint,
    synthesize_headers,
    synthesized_tensors,
)

SYNTH_SEEDS = {"tiny": 4105, "flash6": 51}
"""The seeds that published digests of presets belong to."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 on success, 2 with one line on standard error for bad input."""
    arguments = _parser().parse_args(argv)
    return run_command("v41-loader", lambda: arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="v41-loader", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    inspect = commands.add_parser("inspect", help="check a checkpoint and list what it holds")
    inspect.add_argument("directory", type=Path, metavar="DIR", help="released-format checkpoint directory")
    inspect.add_argument("--without-engram", action="store_true", help="accept a checkpoint whose Engram is left out")
    inspect.add_argument("--allowed-root", type=Path, metavar="DIR",
                         help="where links may lead besides DIR, such as a Hugging Face cache")  # fmt: skip
    add_json_option(inspect)
    inspect.set_defaults(run=_inspect)

    synth = commands.add_parser("synth", help="write a deterministic synthetic checkpoint")
    synth.add_argument("--preset", choices=sorted(PRESETS), required=True)
    seeds = ", ".join(f"{seed} for {preset}" for preset, seed in SYNTH_SEEDS.items())
    synth.add_argument("--seed", type=int, help=f"default: {seeds}")
    synth.add_argument("--shards", type=int, help=f"default: {DEFAULT_SHARDS}")
    synth.add_argument("--headers-only", action="store_true",
                       help="every tensor and all shards of the release, as sparse files without payload")  # fmt: skip
    synth.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new or empty directory")
    add_json_option(synth)
    synth.set_defaults(run=_synth)

    add_plan_command(commands)
    add_shard_commands(commands)
    return parser


def _inspect(arguments: argparse.Namespace) -> None:
    inventory = read_inventory(
        arguments.directory, without_engram=arguments.without_engram, allowed_root=arguments.allowed_root
    )
    if arguments.json:
        print(json.dumps(inventory.to_json(), indent=2))
        return
    totals = inventory.group_totals()
    lines = [(total.group.value, total.tensors, total.nbytes, "skipped" if total.skipped else "") for total in totals]
    read = [total for total in totals if not total.skipped]
    lines.append(("text inference", sum(t.tensors for t in read), sum(t.nbytes for t in read), ""))
    lines.append(("all", sum(t.tensors for t in totals), sum(t.nbytes for t in totals), ""))
    print(f"{'class':<28}{'tensors':>10}{'bytes':>18}")
    for name, tensors, nbytes, note in lines:
        print(f"{name:<28}{tensors:>10,}{nbytes:>18,}  {note}".rstrip())
    if inventory.notice:
        print(f"Engram left out: {inventory.notice}")


def _synth(arguments: argparse.Namespace) -> None:
    config, seed = PRESETS[arguments.preset], arguments.seed
    if arguments.headers_only:
        if seed is not None:
            raise SynthesisError("--seed", seed, "no seed with --headers-only, which writes no payload")
        if arguments.shards is not None:
            raise SynthesisError("--shards", arguments.shards, "none with --headers-only, which writes the release's")
        report = synthesize_headers(config, arguments.out)
        said = f"headers of {_summary(report)}: {arguments.out}"
        print(json.dumps(report.to_json(), indent=2) if arguments.json else said)
        return
    shards = DEFAULT_SHARDS if arguments.shards is None else arguments.shards
    if seed is None:
        seed = SYNTH_SEEDS.get(arguments.preset)
    if seed is None:
        raise SynthesisError("--seed", seed, f"a seed for the whole of {arguments.preset}, or --headers-only")
    total = sum(tensor.nbytes for tensor in synthesized_tensors(config).values())
    with byte_bar(total, arguments.preset) as bar:
        report = synthesize_checkpoint(config, seed, arguments.out, shards, progress=bar.update)
    if arguments.json:
        print(json.dumps({"seed": seed, **report.to_json()}, indent=2))
        return
    print(f"seed {seed}: {_summary(report)}: {arguments.out}")
    if len(report.files) < shards:
        print(f"{len(report.files)} files instead of {shards}: no more have a tensor of their own")


def _summary(report: SynthesisReport) -> str:
    return f"{report.tensors:,} tensors, {report.nbytes:,} bytes in {len(report.files)} files"
