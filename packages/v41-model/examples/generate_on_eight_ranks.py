"""Greedy generation on eight ranks in this process, and what the ranks had to say to each other."""

from __future__ import annotations

import argparse
import sys

from v41_config import ParallelLayout
from v41_config.command_line import run_command
from v41_loader import open_checkpoint
from v41_model import ModelSession, generate


def main(directory: str) -> None:
    """Continue two prompts and print rank 0's account."""
    with open_checkpoint(directory) as checkpoint:
        session = ModelSession.open(checkpoint, ParallelLayout(tp=4, dp=2))
    for prompt, tokens in zip(prompts := [[0, 17, 42], [0, 99]], generate(session, prompts, 4), strict=True):
        print(f"{prompt} -> {tokens}")
    for (kind, site), total in session.world.communicators[0].log.totals.items():
        if site.layer in (None, 0):
            print(f"{kind.value:21} {site!s:27} {total.calls} calls, {total.bytes_sent:6} bytes sent, "
                  f"{total.bytes_received:6} received")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", metavar="CHECKPOINT_DIRECTORY", help="in the released format")
    directory = parser.parse_args().checkpoint
    sys.exit(run_command(parser.prog, lambda: main(directory)))
