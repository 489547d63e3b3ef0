"""``v41-model forward``: logits, and every layer's tensors, of a file of requests."""

from __future__ import annotations

import argparse
from pathlib import Path

from v41_config import ParallelLayout
from v41_model.atomic_file import require_writable
from v41_model.command_options import (
    Subparsers,
    add_checkpoint_options,
    add_layout_options,
    opened_session,
)
from v41_model.errors import OptionError
from v41_model.forward_file import forward_tensors, write_tensors
from v41_model.logit_comparison import LOGIT_BOUNDS, compare_with_goldens
from v41_model.prompt_options import add_prompt_options, given_prompts, token_prompts
from v41_model.step_limits import StepLimits
from v41_model.swap import parse_swaps
from v41_model.swap_options import add_swap_option, swapped
from v41_model.wiring import Wiring
from v41_model.wiring_comparison import different_tensors, verdict
from v41_model.world_options import BOTH, add_wiring_option

__all__ = ["add_forward_command"]


def add_forward_command(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser("forward", help="write logits of every position, optionally every layer's tensors")
    add_checkpoint_options(parser)
    add_prompt_options(parser)
    add_layout_options(parser)
    add_wiring_option(parser)
    add_swap_option(parser)
    parser.add_argument("--decode", type=int, default=0, metavar="N", help="greedy steps after the prefill (default 0)")
    parser.add_argument(
        "--capture", choices=("logits", "layers"), default="logits", help="what to write (default logits)"
    )
    parser.add_argument(
        "--compare-logits",
        action="store_true",
        help="with --swap: run the goldens on the same tokens afterwards and print the cosines of all logits; exit "
        f"code 1 below {LOGIT_BOUNDS.minimum:g} at one position or a median of {LOGIT_BOUNDS.median:g}",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.safetensors")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the file and name it."""
    given = given_prompts(arguments)
    parse_swaps(arguments.swap, ParallelLayout(arguments.tp, arguments.dp))  # before anything is loaded
    if arguments.compare_logits and not arguments.swap:
        raise OptionError("--compare-logits", "no --swap", "operators of a provider, to be compared with the goldens")
    require_writable(arguments.out)
    with opened_session(arguments) as (checkpoint, session):
        prompts = token_prompts(given, checkpoint.config, arguments.checkpoint, arguments.chat).tokens
        session.limits = StepLimits(sequences=len(prompts), prefill_rows=sum(map(len, prompts)))  # one step for all
        layers = arguments.capture == "layers"
        different = []
        with swapped(arguments, session) as report:
            tensors = forward_tensors(session, prompts, arguments.decode, layers)
            if arguments.wiring == BOTH:
                again = forward_tensors(session.rewired(Wiring.REPLICATED), prompts, arguments.decode, layers)
                different = different_tensors(tensors, again)
        logits = compare_with_goldens(session, tensors, len(prompts)) if arguments.compare_logits else None
        writes = 0 in session.world.local_ranks
        metadata = {"layout": f"tp={arguments.tp} dp={arguments.dp}", "capture": arguments.capture}
        if checkpoint.notice is not None:
            metadata["notice"] = checkpoint.notice
    if writes:
        write_tensors(arguments.out, tensors, metadata)
    print(f"{arguments.out}: {len(tensors)} tensors of {len(prompts)} requests")
    if arguments.wiring == BOTH:
        print(verdict(different, f"{len(tensors)} tensors"))
    if logits is not None:
        print(f"logits beside the goldens': {logits!r}")
    verdicts = [part.accepted for part in (report, logits) if part is not None]
    return 0 if not different and all(verdicts) else 1
