"""Options that the commands on shards share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from v41_config.parallel_layout import ParallelLayout
from v41_loader.inventory import Inventory, read_inventory
from v41_loader.layouts import LAYOUTS

_RANKS = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?", re.ASCII)


def add_sharding_options(parser: argparse.ArgumentParser) -> None:
    """What is to be sharded, and how."""
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="released-format directory")
    parser.add_argument("--tp", type=int, required=True, help="ranks of an attention group")
    parser.add_argument("--dp", type=int, required=True, help="groups that share the requests; experts go by TP x DP")
    parser.add_argument("--ranks", type=parse_ranks, metavar="LIST", help="only these, such as 0,4-7")
    parser.add_argument("--layout", choices=[layout.name for layout in LAYOUTS], default="canonical",
                        help="byte layout of the weights (default: %(default)s)")  # fmt: skip
    parser.add_argument("--without-engram", action="store_true", help="accept a checkpoint whose Engram is left out")
    add_root_option(parser)


def add_root_option(parser: argparse.ArgumentParser) -> None:
    """Where links of a checkpoint may lead."""
    parser.add_argument("--allowed-root", type=Path, metavar="DIR",
                        help="where links may lead besides the checkpoint, such as a Hugging Face cache")  # fmt: skip


def add_threads_option(parser: argparse.ArgumentParser) -> None:
    """How many threads read and write."""
    parser.add_argument("--threads", type=int, help="default: two per processor, up to eight")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """The report for programs."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def sharded_inventory(arguments: argparse.Namespace) -> Inventory:
    """The checkpoint of `add_sharding_options`; errors as `read_inventory`."""
    return read_inventory(
        arguments.checkpoint, without_engram=arguments.without_engram, allowed_root=arguments.allowed_root
    )


def parallel_layout(arguments: argparse.Namespace) -> ParallelLayout:
    """The layout of `add_sharding_options`."""
    return ParallelLayout(arguments.tp, arguments.dp)


def parse_ranks(text: str) -> tuple[int, ...]:
    """Ranks and ranges of ranks, both ends included: `0,4-7`; argparse's error for anything else."""
    ranks: list[int] = []
    for item in text.split(","):
        found = _RANKS.fullmatch(item)
        first, last = (0, -1) if found is None else (int(found[1]), int(found[2] or found[1]))
        if last < first:
            raise argparse.ArgumentTypeError(f"expected ranks and ascending ranges, such as 0,4-7, found {text[:40]!r}")
        ranks += range(first, last + 1)
    return tuple(ranks)


def ranks_text(ranks: Sequence[int]) -> str:
    """Ascending ranks as `parse_ranks` reads them: `0,4-7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
