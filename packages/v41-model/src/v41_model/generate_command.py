"""``v41-model generate``: continuation of every prompt, printed as it comes."""

from __future__ import annotations

import argparse
import json
import sys
import time

from tqdm import tqdm

from v41_config import ParallelLayout
from v41_model.command_options import Subparsers, add_checkpoint_options, add_layout_options, opened_session
from v41_model.generation import generate, stream
from v41_model.prompt_options import Prompts, add_prompt_options, given_prompts, token_prompts
from v41_model.sampling import Sampling
from v41_model.session import ModelSession
from v41_model.step_limits import StepLimits
from v41_model.swap import parse_swaps
from v41_model.swap_options import add_swap_option, swapped
from v41_model.wiring import Wiring
from v41_model.wiring_comparison import verdict
from v41_model.world_options import BOTH, add_wiring_option

__all__ = ["add_generate_command"]


def add_generate_command(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser("generate", help="continue every prompt, printing tokens as they come")
    add_checkpoint_options(parser)
    add_prompt_options(parser)
    add_layout_options(parser)
    add_wiring_option(parser)
    add_swap_option(parser)
    parser.add_argument("--max-new-tokens", type=int, required=True, metavar="N", help="tokens per request")
    parser.add_argument("--stop-at-eos", action="store_true", help="end a request at the model's end-of-sequence id")
    parser.add_argument("--stop-id", type=int, action="append", default=[], metavar="ID", help="end at it; repeatable")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default) is greedy")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest P (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt, the next ones count up (default 0)")
    parser.add_argument(
        "--sequences", type=int, default=StepLimits().sequences, metavar="N", help="requests of a DP group that run "
        "at the same time (default %(default)s); the others wait",
    )  # fmt: skip
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="print tokens, or text, as they come (default), or only at the end",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """One line per token or piece of text as it comes, then one line per request with all that is new."""
    given = given_prompts(arguments)
    parse_swaps(arguments.swap, ParallelLayout(arguments.tp, arguments.dp))  # before anything is loaded
    sampling = Sampling(arguments.temperature, arguments.top_p, arguments.seed)
    limits = StepLimits(sequences=arguments.sequences)
    with opened_session(arguments, limits) as (checkpoint, session), swapped(arguments, session) as report:
        prompts = token_prompts(given, checkpoint.config, arguments.checkpoint, arguments.chat)
        if checkpoint.notice is not None:
            print(checkpoint.notice)
        ends = arguments.stop_at_eos or arguments.chat is not None
        stop_ids = {*arguments.stop_id, *([checkpoint.config.eos_token_id] if ends else [])}
        generated = _streamed(arguments, session, prompts, stop_ids, sampling)
        different = []
        if arguments.wiring == BOTH:
            again = generate(
                session.rewired(Wiring.REPLICATED),
                prompts.tokens,
                arguments.max_new_tokens,
                stop_ids,
                sampling=sampling,
            )
            different = [f"request {i}" for i, tokens in enumerate(again) if tokens != generated[i]]
        for index, tokens in enumerate(generated):
            print(f"request {index} done: {_shown(prompts, tokens)}")
    if arguments.wiring == BOTH:
        print(verdict(different, f"the tokens of {len(prompts.tokens)} requests"))
    return 1 if different or (report is not None and not report.accepted) else 0


def _streamed(
    arguments: argparse.Namespace, session: ModelSession, prompts: Prompts, stop_ids: set[int], sampling: Sampling
) -> list[list[int]]:
    """The new tokens per prompt; a bar on terminals, and the speed at the end, on standard error."""
    leads = 0 in session.world.local_ranks
    new_tokens = stream(session, prompts.tokens, arguments.max_new_tokens, stop_ids, sampling=sampling)
    texts = None if prompts.codec is None else [prompts.codec.stream() for _ in prompts.tokens]
    generated: list[list[int]] = [[] for _ in prompts.tokens]
    began = time.perf_counter()
    total = len(prompts.tokens) * arguments.max_new_tokens
    with tqdm(total=total, unit="token", desc="generate", disable=None if leads else True) as progress:
        for new in new_tokens:
            generated[new.request].append(new.token)
            progress.update()
            piece = str(new.token) if texts is None else texts[new.request].push(new.token)
            if arguments.stream and piece:
                progress.write(f"request {new.request}: {piece if texts is None else _quoted(piece)}")
                sys.stdout.flush()
    if leads:
        count, seconds = sum(map(len, generated)), time.perf_counter() - began
        rate = f"{count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s"
        print(f"v41-model: {rate}, prompts of {sum(map(len, prompts.tokens))} tokens included", file=sys.stderr)
    return generated


def _shown(prompts: Prompts, tokens: list[int]) -> str:
    return " ".join(map(str, tokens)) if prompts.codec is None else _quoted(prompts.codec.decode(tokens))


def _quoted(text: str) -> str:
    """On one line, whatever the text holds."""
    return json.dumps(text, ensure_ascii=False)
