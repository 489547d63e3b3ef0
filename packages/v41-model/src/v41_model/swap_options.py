"""``--swap``: operators of a provider inside the model that a command runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from v41_model.session import ModelSession
from v41_model.swap import Swap, parse_swaps
from v41_model.swap_report import SwapReport

__all__ = ["add_swap_option", "swapped"]


def add_swap_option(parser: argparse.ArgumentParser) -> None:
    """``--swap``."""
    parser.add_argument(
        "--swap",
        action="append",
        default=[],
        metavar="OPERATOR,...=PROVIDER",
        help="run these operators (all: every one) by an installed provider, pypto say, beside their goldens, and "
        "report the first layer and tensor that differ; repeatable. Exit code 1 if the judges reject one",
    )


@contextmanager
def swapped(arguments: argparse.Namespace, session: ModelSession) -> Iterator[SwapReport | None]:
    """The report of ``--swap``, filled while the session runs and printed at the end; None without the option."""
    if not arguments.swap:
        yield None
        return
    before = session.operators
    swap = Swap.of_installed(parse_swaps(arguments.swap), session.config, session.world, before)
    session.operators = swap.operators
    try:
        yield swap.report
        for line in swap.report.lines():
            print(f"swap: {line}")
    finally:
        session.operators = before
        swap.close()
