"""The world a command runs in: all ranks in this process, or the one that torchrun gave to it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout

from torch import distributed

from v41_config import ParallelLayout
from v41_model.errors import OptionError
from v41_model.local_world import LocalWorld
from v41_model.torch_distributed_world import BACKEND, TIMEOUT, TorchDistributedWorld
from v41_model.wiring import Wiring
from v41_model.world import World

__all__ = ["BOTH", "add_wiring_option", "add_world_options", "first_wiring", "opened_world", "printed_once"]

BOTH = "both"
"""The choice of ``--wiring`` that runs the sharded wiring, then the replicated one, and compares."""


def add_world_options(parser: argparse.ArgumentParser) -> None:
    """``--backend`` and ``--timeout``, which only a command that torchrun has started takes."""
    parser.add_argument("--backend", help=f"torch.distributed backend, only under torchrun (default {BACKEND})")
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help=f"longest wait for the other ranks in one collective, only under torchrun (default {TIMEOUT:g})",
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

    Errors: :class:`OptionError` for ``--backend`` or ``--timeout`` without torchrun; :class:`WorldError`, as
    :class:`TorchDistributedWorld` raises it.
    """
    backend, timeout = arguments.backend, arguments.timeout
    if not distributed.is_torchelastic_launched():
        for option, value in (("--backend", backend), ("--timeout", timeout)):
            if value is not None:
                raise OptionError(option, value, "torchrun, which starts a process for each rank: here is one for all")
        yield LocalWorld(layout)
        return
    backend = BACKEND if backend is None else backend
    with TorchDistributedWorld(layout, backend, timeout=TIMEOUT if timeout is None else timeout) as world:
        yield world


@contextmanager
def printed_once() -> Iterator[None]:
    """Under torchrun every process runs the command, and the first one alone prints its results."""
    silent = distributed.is_torchelastic_launched() and os.environ.get("RANK", "0") != "0"
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere) if silent else nullcontext():
        yield
