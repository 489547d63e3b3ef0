"""``v41-model generate``: greedy continuation of a file of requests."""

from __future__ import annotations

import argparse

from v41_model.command_options import (
    Subparsers,
    add_checkpoint_options,
    add_layout_options,
    add_requests_option,
    opened_session,
)
from v41_model.generation import generate
from v41_model.request_file import read_request_file
from v41_model.wiring import Wiring
from v41_model.wiring_comparison import verdict
from v41_model.world_options import BOTH, add_wiring_option

__all__ = ["add_generate_command"]


def add_generate_command(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser("generate", help="continue every request greedily, printing tokens as they come")
    add_checkpoint_options(parser)
    add_requests_option(parser)
    add_layout_options(parser)
    add_wiring_option(parser)
    parser.add_argument("--max-new-tokens", type=int, required=True, metavar="N", help="tokens per request")
    parser.add_argument("--stop-at-eos", action="store_true", help="end a request at the model's end-of-sequence id")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """One line per token as it comes, then one line per request with all its new tokens."""
    prompts = read_request_file(arguments.requests)
    with opened_session(arguments) as (checkpoint, session):
        if checkpoint.inventory.notice is not None:
            print(checkpoint.inventory.notice)
        stop_ids = {checkpoint.config.eos_token_id} if arguments.stop_at_eos else set()
        generated = generate(
            session,
            prompts,
            arguments.max_new_tokens,
            stop_ids,
            on_token=lambda request, token: print(f"request {request}: {token}", flush=True),
        )
        different = []
        if arguments.wiring == BOTH:
            again = generate(session.rewired(Wiring.REPLICATED), prompts, arguments.max_new_tokens, stop_ids)
            different = [f"request {i}" for i, tokens in enumerate(again) if tokens != generated[i]]
    for index, tokens in enumerate(generated):
        print(f"request {index} done: {' '.join(map(str, tokens))}")
    if arguments.wiring == BOTH:
        print(verdict(different, f"the tokens of {len(prompts)} requests"))
    return 1 if different else 0
