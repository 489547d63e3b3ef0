"""``v41-model``: one subcommand per job. Bad input ends in one line on stderr and exit code 2.

A command is a function that adds its parser and sets ``run``, which takes the parsed arguments and returns the exit
code; :data:`COMMANDS` lists them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from v41_config.command_line import run_command
from v41_model.command_options import Subparsers
from v41_model.conform_command import add_conform_command
from v41_model.forward_command import add_forward_command
from v41_model.generate_command import add_generate_command
from v41_model.traffic_command import add_traffic_command
from v41_model.verify_kernels_command import add_verify_kernels_command
from v41_model.world_options import printed_once

__all__ = ["main"]

COMMANDS: tuple[Callable[[Subparsers], None], ...] = (
    add_generate_command,
    add_forward_command,
    add_conform_command,
    add_traffic_command,
    add_verify_kernels_command,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit code."""
    parser = argparse.ArgumentParser(
        prog="v41-model", description="DeepSeek-V4.1-Flash on tensor and expert parallel ranks"
    )
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="command")
    for add_command in COMMANDS:
        add_command(subparsers)
    arguments = parser.parse_args(argv)
    with printed_once():
        return run_command("v41-model", lambda: arguments.run(arguments))
