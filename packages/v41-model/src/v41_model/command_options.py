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
from v41_loader import Checkpoint, open_checkpoint
from v41_model.errors import OptionError
from v41_model.session import ModelSession
from v41_model.step_limits import StepLimits

__all__ = ["Subparsers", "add_checkpoint_options", "add_layout_options", "opened_checkpoint", "opened_session"]

MAX_THREADS = 1024
"""More than a machine has; torch would take any number and fail to start them, or not return."""

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """``--checkpoint`` and ``--without-engram``."""
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="directory in the released format"
    )
    parser.add_argument(
        "--without-engram",
        action="store_true",
        help="accept a checkpoint with Engram and run without it: not comparable with the released model",
    )


def add_layout_options(parser: argparse.ArgumentParser) -> None:
    """``--requests``, ``--tp``, ``--dp`` and ``--threads``."""
    parser.add_argument(
        "--requests", type=Path, required=True, metavar="FILE.json", help='{"requests": [[token ids], ...]}'
    )
    parser.add_argument("--tp", type=int, default=1, help="ranks that share attention (default 1)")
    parser.add_argument("--dp", type=int, default=1, help="groups that share the requests (default 1)")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads of an operator (default: torch's choice); 1 is best for TINY"
    )


@contextmanager
def opened_checkpoint(arguments: argparse.Namespace) -> Iterator[Checkpoint]:
    """The checkpoint of the options; what must be said of every result goes to stderr first."""
    with open_checkpoint(arguments.checkpoint, without_engram=arguments.without_engram) as checkpoint:
        if checkpoint.inventory.notice is not None:
            print(f"v41-model: {checkpoint.inventory.notice}", file=sys.stderr)
        yield checkpoint


@contextmanager
def opened_session(
    arguments: argparse.Namespace, limits: StepLimits | None = None
) -> Iterator[tuple[Checkpoint, ModelSession]]:
    """Checkpoint and session of the options, with all ranks in this process."""
    layout = ParallelLayout(arguments.tp, arguments.dp)
    if arguments.threads is not None:
        if not 1 <= arguments.threads <= MAX_THREADS:
            raise OptionError("--threads", arguments.threads, f"1 to {MAX_THREADS}")
        torch.set_num_threads(arguments.threads)
    with opened_checkpoint(arguments) as checkpoint:
        yield checkpoint, ModelSession.open(checkpoint, layout, limits=limits)
