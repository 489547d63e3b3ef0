"""Greedy generation on eight ranks in this process, and what the ranks had to say to each other.

Usage: python generate_on_eight_ranks.py CHECKPOINT_DIRECTORY
"""

from __future__ import annotations

import sys

from v41_config import ParallelLayout
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
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} CHECKPOINT_DIRECTORY")
    main(sys.argv[1])
