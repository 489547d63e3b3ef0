"""`v41-config`: plan a card's memory, list the operators, print the schema of a config file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from v41_config.capacity_plan import DEFAULT_HBM_BYTES, CapacityAssumptions, CapacityPlan, parse_bytes
from v41_config.command_line import run_command
from v41_config.model_config import ModelConfig
from v41_config.parallel_layout import ParallelLayout
from v41_config.presets import PRESETS

DOES_NOT_FIT = 1
"""Exit code of a plan that a card cannot hold."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 on success, 1 for a plan that does not fit, 2 with one line on standard error for bad input."""
    arguments = _parser().parse_args(argv)
    return run_command("v41-config", lambda: arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="v41-config", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    assumed = CapacityAssumptions()

    plan = commands.add_parser("plan", help="bytes of one card, and what fits; exit code 1 where the plan does not")
    model = plan.add_mutually_exclusive_group()
    model.add_argument("--preset", choices=sorted(PRESETS), default="flash", help="default: %(default)s")
    model.add_argument("--config", type=Path, metavar="FILE", help="config.json, or its directory")
    plan.add_argument("--context", type=int, metavar="TOKENS", help="default: max_position_embeddings")
    plan.add_argument("--requests", type=int, default=32, help="of one DP group; default: %(default)s")
    plan.add_argument("--tp", type=int, default=4, help="ranks of an attention group; default: %(default)s")
    plan.add_argument("--dp", type=int, default=2, help="groups; default: %(default)s")
    plan.add_argument("--hbm", metavar="SIZE", help="memory of a card such as 128GiB, the default")
    plan.add_argument("--bf16-cache", action="store_true", help="caches in BF16, for comparison")
    plan.add_argument("--bf16-wo-a", action="store_true", help="wo_a decoded to BF16")
    plan.add_argument("--without-engram", action="store_true", help="leave the n-gram memory out")
    plan.add_argument("--decode-tokens", type=int, default=assumed.decode_tokens, metavar="ROWS",
                      help="rows of a request in a decode step; default: %(default)s")  # fmt: skip
    plan.add_argument("--prefill-tokens", type=int, default=assumed.prefill_tokens, metavar="ROWS",
                      help="rows of a DP group in a prefill step; default: %(default)s")  # fmt: skip
    plan.add_argument("--max-logits", metavar="SIZE", help="budget of the indexer's scores; default: 512MiB")
    plan.add_argument("--reserve", metavar="SIZE", help="memory for anything else; default: none")
    plan.add_argument("--json", action="store_true", help="stable keys, documented in docs/capacity.md")
    plan.add_argument("--plot", type=Path, metavar="FILE.png", help="a bar chart too (extra: plot)")
    plan.set_defaults(run=_plan)

    listing = commands.add_parser("operators", help="what every operator takes and writes")
    listing.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    listing.add_argument("--markdown", action="store_true", help="as docs/operators.md")
    listing.set_defaults(run=_operators)

    schema = commands.add_parser("schema", help="JSON schema of a released config.json")
    schema.set_defaults(run=_schema)
    return parser


def _plan(arguments: argparse.Namespace) -> int:
    from v41_config.capacity_report import plan_as_text, plot_plan

    config = ModelConfig.from_json(arguments.config) if arguments.config else PRESETS[arguments.preset]
    hbm = DEFAULT_HBM_BYTES if arguments.hbm is None else parse_bytes(arguments.hbm, "--hbm")
    assumed = CapacityAssumptions()
    budget, reserve = arguments.max_logits, arguments.reserve
    plan = CapacityPlan(
        config,
        ParallelLayout(arguments.tp, arguments.dp),
        context=config.max_position_embeddings if arguments.context is None else arguments.context,
        requests=arguments.requests,
        assumptions=CapacityAssumptions(
            decode_tokens=arguments.decode_tokens,
            prefill_tokens=arguments.prefill_tokens,
            bf16_cache=arguments.bf16_cache,
            bf16_wo_a=arguments.bf16_wo_a,
            engram=not arguments.without_engram,
            max_logits_bytes=assumed.max_logits_bytes if budget is None else parse_bytes(budget, "--max-logits"),
            reserved_bytes=assumed.reserved_bytes if reserve is None else parse_bytes(reserve, "--reserve"),
        ),
    )
    if arguments.plot:
        plot_plan(plan, hbm, arguments.plot)
    print(json.dumps(plan.to_json(hbm), indent=2) if arguments.json else plan_as_text(plan, hbm))
    return 0 if plan.total_bytes <= hbm else DOES_NOT_FIT


def _operators(arguments: argparse.Namespace) -> None:
    from v41_config.operator_listing import operators_as_markdown, operators_as_text
    from v41_config.operator_tables import find_operator, operators

    chosen = [find_operator(name) for name in arguments.names] or list(operators().values())
    if arguments.markdown:
        print(operators_as_markdown(chosen), end="")
    else:
        print(operators_as_text(chosen))


def _schema(arguments: argparse.Namespace) -> None:
    from v41_config.config_schema import config_schema

    print(json.dumps(config_schema(), indent=2))
