"""``--swap``: operators of a provider inside the model that a command runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from v41_model.session import ModelSession
from v41_model.swap import EVERY, Swap, parse_swaps
from v41_model.swap_report import SwapReport

__all__ = ["add_swap_option", "swapped"]


def add_swap_option(parser: argparse.ArgumentParser) -> None:
    """``--swap``."""
    parser.add_argument(
        "--swap",
        action="append",
        default=[],
        metavar="OPERATOR,...=PROVIDER",
        help="run these operators (all: every one but those made of others) by an installed provider, pypto say, "
        "beside their goldens, and report the first layer and tensor that differ; repeatable. Where one is part of "
        "another, the larger one runs. Exit code 1 if the judges reject one",
    )


@contextmanager
def swapped(arguments: argparse.Namespace, session: ModelSession) -> Iterator[SwapReport | None]:
    """The report of ``--swap``, filled while the session runs and printed at the end; None without the option."""
    if not arguments.swap:
        yield None
        return
    before = session.operators
    chosen = parse_swaps(arguments.swap, session.layout)
    swap = Swap.of_installed(chosen, session.config, session.world, before)
    session.operators = swap.operators
    try:
        yield swap.report
        idle = [name for name in chosen if name != EVERY and name not in swap.report.operators]
        if idle:
            print(f"swap: not called (part of a larger one, or of another phase or wiring): {', '.join(idle)}")
        for line in swap.report.lines():
            print(f"swap: {line}")
    finally:
        session.operators = before
        swap.close()
