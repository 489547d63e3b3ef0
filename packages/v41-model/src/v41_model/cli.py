"""``v41-model``: one subcommand per job. Bad input ends in one line on stderr and exit code 2.

A command is a function that adds its parser and sets ``run``, which takes the parsed arguments and returns the exit
code; :data:`COMMANDS` lists them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from v41_config import V41Error
from v41_model.command_options import Subparsers
from v41_model.conform_command import add_conform_command
from v41_model.forward_command import add_forward_command
from v41_model.generate_command import add_generate_command

__all__ = ["main"]

INTERRUPTED = 130
"""Exit code of a command that was stopped from the keyboard."""

BAD_INPUT = 2
"""Exit code of every typed error (and of argparse)."""

COMMANDS: tuple[Callable[[Subparsers], None], ...] = (
    add_generate_command,
    add_forward_command,
    add_conform_command,
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
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except V41Error as error:
        print(f"v41-model: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        _discard_output()
        return 0
    except OSError as error:
        if error.filename is not None:  # of a file, for whose errors its reader or writer has words
            raise
        _discard_output()
        print(f"v41-model: standard output: expected a file that can be written, found {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _discard_output() -> None:
    """What is still buffered goes nowhere: Python would try once more to write it at exit, and fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
