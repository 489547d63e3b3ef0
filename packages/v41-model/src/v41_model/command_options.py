"""Options that several commands share, and what they open."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import torch

from v41_config import ParallelLayout
from v41_loader import Checkpoint, open_checkpoint, open_weights
from v41_model.checkpoint_weights import StoredWeights
from v41_model.errors import OptionError
from v41_model.session import ModelSession
from v41_model.step_limits import StepLimits
from v41_model.world_options import add_world_options, first_wiring, opened_world

__all__ = [
    "Subparsers",
    "add_checkpoint_options",
    "add_layout_options",
    "opened_checkpoint",
    "opened_session",
    "opened_weights",
    "set_threads",
]

MAX_THREADS = 1024
"""More than a machine has; torch would take any number and fail to start them, or not return."""

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """``--checkpoint`` and ``--without-engram``."""
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="directory in the released format, or sharded"
    )
    parser.add_argument(
        "--without-engram",
        action="store_true",
        help="accept a checkpoint with Engram and run without it: not comparable with the released model",
    )


def add_layout_options(parser: argparse.ArgumentParser, tp: int = 1, dp: int = 1) -> None:
    """``--tp`` and ``--dp`` with their defaults, ``--threads``, and the world's options."""
    parser.add_argument("--tp", type=int, default=tp, help=f"ranks that share attention (default {tp})")
    parser.add_argument("--dp", type=int, default=dp, help=f"groups that share the requests (default {dp})")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads of an operator (default: torch's choice); 1 is best for TINY"
    )
    add_world_options(parser)


def set_threads(arguments: argparse.Namespace) -> None:
    """Obey ``--threads``. Errors: :class:`OptionError`."""
    if arguments.threads is not None:
        if not 1 <= arguments.threads <= MAX_THREADS:
            raise OptionError("--threads", arguments.threads, f"1 to {MAX_THREADS}")
        torch.set_num_threads(arguments.threads)


@contextmanager
def opened_checkpoint(arguments: argparse.Namespace) -> Iterator[Checkpoint]:
    """The checkpoint of the options; what must be said of every result goes to stderr first."""
    with open_checkpoint(arguments.checkpoint, without_engram=arguments.without_engram) as checkpoint:
        _say_first(checkpoint)
        yield checkpoint


@contextmanager
def opened_weights(arguments: argparse.Namespace) -> Iterator[StoredWeights]:
    """As :func:`opened_checkpoint`, or a directory that was sharded for a layout."""
    with open_weights(arguments.checkpoint, without_engram=arguments.without_engram) as weights:
        _say_first(weights)
        yield weights


def _say_first(weights: StoredWeights) -> None:
    if weights.notice is not None:
        print(f"v41-model: {weights.notice}", file=sys.stderr)


@contextmanager
def opened_session(
    arguments: argparse.Namespace, limits: StepLimits | None = None
) -> Iterator[tuple[StoredWeights, ModelSession]]:
    """Checkpoint and session of the options, with all ranks in this process or, under torchrun, one of them."""
    layout = ParallelLayout(arguments.tp, arguments.dp)
    set_threads(arguments)
    with opened_world(arguments, layout) as world, opened_weights(arguments) as weights:
        yield weights, ModelSession.open(weights, layout, world, limits=limits, wiring=first_wiring(arguments))
