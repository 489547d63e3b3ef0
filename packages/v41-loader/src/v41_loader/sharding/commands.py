"""The commands `shard` and `verify`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from v41_loader.digests import DigestAlgorithm
from v41_loader.inventory import GroupTotal, read_inventory
from v41_loader.progress_bar import Bar, byte_bar
from v41_loader.sharding.command_options import (
    add_json_option,
    add_root_option,
    add_sharding_options,
    add_threads_option,
    parallel_layout,
    parse_ranks,
    sharded_inventory,
)
from v41_loader.sharding.rank_contents import GroupContents, rank_file
from v41_loader.sharding.rank_file_writer import Progress
from v41_loader.sharding.sharder import shard_checkpoint
from v41_loader.sharding.verification import verify_shards

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_shard_commands(commands: Commands) -> None:
    """Add both to a parser's commands."""
    shard = commands.add_parser("shard", help="write each rank's part of a checkpoint to a file of its own")
    add_sharding_options(shard)
    add_threads_option(shard)
    shard.add_argument("--digest", choices=[a.value for a in DigestAlgorithm], default=DigestAlgorithm.XXH3_128.value,
                       help="of every tensor, in the manifest (default: %(default)s)")  # fmt: skip
    shard.add_argument("--out", type=Path, required=True, metavar="DIR", help="new, empty, or an interrupted run's")
    add_json_option(shard)
    shard.set_defaults(run=_shard)

    verify = commands.add_parser("verify", help="prove that shards are the checkpoint they were made from")
    verify.add_argument("directory", type=Path, metavar="DIR", help="directory that `shard` completed")
    verify.add_argument("--source", type=Path, metavar="DIR", help="read the checkpoint again and compare it too")
    verify.add_argument("--ranks", type=parse_ranks, metavar="LIST", help="only these; the union stays unproven")
    add_root_option(verify)
    add_threads_option(verify)
    add_json_option(verify)
    verify.set_defaults(run=_verify)


def _shard(arguments: argparse.Namespace) -> None:
    inventory = sharded_inventory(arguments)
    with _progress("shard") as progress:
        report = shard_checkpoint(
            inventory,
            arguments.out,
            parallel_layout(arguments),
            arguments.ranks,
            arguments.layout,
            DigestAlgorithm(arguments.digest),
            progress,
            arguments.threads,
        )
    if arguments.json:
        print(json.dumps(report.to_json(), indent=2))
        return
    _print_groups(report.groups, report.skipped, lambda _: "")
    for rank in sorted(report.written + report.kept):
        name = rank_file(rank)
        print(f"{name}: {report.manifest.shards[name]:,} bytes{'' if rank in report.written else ', kept'}")
    _print_notice(report.manifest.settings.notice)


def _verify(arguments: argparse.Namespace) -> None:
    source = None
    if arguments.source is not None:  # what is left out of the text was decided when the shards were made
        source = read_inventory(arguments.source, without_engram=True, allowed_root=arguments.allowed_root)
    with _progress("verify") as progress:
        report = verify_shards(arguments.directory, source, arguments.ranks, progress, arguments.threads)
    if arguments.json:
        print(json.dumps(report.to_json(), indent=2))
        return

    def proven(group: GroupContents) -> str:
        scales = f", {group.scales:,} scales paired" if group.scales else ""
        union = ", union" if report.union else ""
        return f"digests{' and source' if report.source else ''}{union}, finite{scales}: ok"

    _print_groups(report.groups, report.skipped, proven)
    union = "together the whole source, every part once" if report.union else "the union was not looked at"
    print(f"ranks {', '.join(map(str, report.ranks))}: {union}")
    _print_notice(report.notice)


@contextmanager
def _progress(what: str) -> Iterator[Progress]:
    """A bar with bytes per second and the time left, once there is something to do."""
    with ExitStack() as stack:
        bars: list[Bar] = []

        def progress(nbytes: int, total: int) -> None:
            if not bars:
                bars.append(stack.enter_context(byte_bar(total, what)))
            bars[0].update(nbytes)

        yield progress


def _print_groups(
    groups: tuple[GroupContents, ...], skipped: tuple[GroupTotal, ...], note: Callable[[GroupContents], str]
) -> None:
    print(f"{'class':<28}{'tensors':>10}{'source bytes':>18}{'rank file bytes':>18}")
    for group in groups:
        line = f"{group.group.value:<28}{group.tensors:>10,}{group.nbytes:>18,}{group.stored_nbytes:>18,}"
        print(f"{line}  {note(group)}".rstrip())
    for total in skipped:
        print(f"{total.group.value:<28}{total.tensors:>10,}{total.nbytes:>18,}{'skipped':>18}")


def _print_notice(notice: str | None) -> None:
    if notice:
        print(f"Engram left out: {notice}")
