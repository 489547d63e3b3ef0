"""The world a command runs in: all ranks in this process, or the one that torchrun gave to it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout

from torch import distributed

from v41_config import ParallelLayout
from v41_model.local_world import LocalWorld
from v41_model.torch_distributed_world import TorchDistributedWorld
from v41_model.wiring import Wiring
from v41_model.world import World

__all__ = ["BOTH", "add_wiring_option", "add_world_options", "first_wiring", "opened_world", "printed_once"]

BOTH = "both"
"""The choice of ``--wiring`` that runs the sharded wiring, then the replicated one, and compares."""


def add_world_options(parser: argparse.ArgumentParser) -> None:
    """``--backend`` and ``--timeout``, which count under torchrun."""
    parser.add_argument("--backend", default="gloo", help="torch.distributed backend under torchrun (default gloo)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="longest wait for the other ranks in one collective under torchrun (default 600)",
    )


def add_wiring_option(parser: argparse.ArgumentParser) -> None:
    """``--wiring``."""
    parser.add_argument(
        "--wiring",
        choices=(BOTH, *(wiring.value for wiring in Wiring)),
        default=Wiring.SHARDED.value,
        help="what a TP group shares: sharded (default) or replicated rows; both runs one after the other and compares",
    )


def first_wiring(arguments: argparse.Namespace) -> Wiring:
    """The wiring to run, the first one of both."""
    return Wiring.SHARDED if arguments.wiring == BOTH else Wiring(arguments.wiring)


@contextmanager
def opened_world(arguments: argparse.Namespace, layout: ParallelLayout) -> Iterator[World]:
    """The world of ``layout``: of one rank per process where torchrun has started this one.

    Errors: :class:`WorldError`, as :class:`TorchDistributedWorld` raises it.
    """
    if not distributed.is_torchelastic_launched():
        yield LocalWorld(layout)
        return
    with TorchDistributedWorld(layout, arguments.backend, timeout=arguments.timeout) as world:
        yield world


@contextmanager
def printed_once() -> Iterator[None]:
    """Under torchrun every process runs the command, and the first one alone prints its results."""
    silent = distributed.is_torchelastic_launched() and os.environ.get("RANK", "0") != "0"
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere) if silent else nullcontext():
        yield
