"""A serving loop of one's own on `ModelSession`: arrivals, chunked prefill, mixed batches, cancellation, reuse.

Everything that a serving stack owns stands here: requests, block tables, state blocks and the order of work. The
session owns weights and cache memory. docs/serving.md of v41-model is the contract.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from v41_config import CapacityPlan, ParallelLayout
from v41_config.command_line import run_command
from v41_loader import open_checkpoint
from v41_model import ModelSession, PageAllocator, PoolError, Sampling, StepBatch, choose_tokens

LAYOUT = ParallelLayout(tp=2, dp=2)
CONTEXT, REQUESTS = 256, 2
CHUNK = 8
"""Rows of a prompt in one step: short, so that the example shows chunks."""


@dataclass(eq=False)
class Conversation:
    """A request as this loop sees it: its tokens, how many are in the caches, and its row in the page allocator."""

    name: str
    tokens: list[int]
    wanted: int
    sampling: Sampling = field(default_factory=Sampling)
    stored: int = 0
    row: int = -1
    answer: list[int] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.answer) == self.wanted


class DpGroup:
    """The requests of one DP group. Block numbers mean something inside one group only."""

    def __init__(self, session: ModelSession, dp_rank: int) -> None:
        assert session.budget is not None
        self.session, self.dp_rank = session, dp_rank
        self.pages = PageAllocator(session.config, session.budget.blocks, REQUESTS, session.budget.max_tokens)
        self.running: list[Conversation] = []

    def admit(self, sequence: Conversation) -> bool:
        """Take a request in, with pages for all it may need; False while the pool is full."""
        try:
            sequence.row = self.pages.admit()
            self.pages.grow(sequence.row, len(sequence.tokens) + sequence.wanted)
        except PoolError as full:
            print(f"  {sequence.name} waits: {full}")
            if sequence.row >= 0:
                self.pages.drop(sequence.row)
                sequence.row = -1
            return False
        self.running.append(sequence)
        return True

    def release(self, sequence: Conversation) -> None:
        """A request is over, finished or not: tell the session, then give its blocks to others."""
        (state_block,) = {int(table[0, 0]) for table in self.pages.state_block_tables([sequence.row]).values()}
        self.session.reset_request(self.dp_rank, state_block)
        self.pages.drop(sequence.row)
        self.running.remove(sequence)

    def batch(self) -> tuple[StepBatch, list[int]]:
        """Everyone's next rows, and how many: a chunk of a prompt, or the one token chosen last."""
        counts = [min(CHUNK, len(s.tokens) - s.stored) for s in self.running]
        if not self.running:
            return StepBatch.idle(self.session.config), counts
        rows = [s.row for s in self.running]
        ids = [token for s, n in zip(self.running, counts, strict=True) for token in s.tokens[s.stored : s.stored + n]]
        batch = StepBatch(
            token_ids=np.array(ids, dtype=np.int32),
            query_start_loc=np.cumsum([0, *counts]),
            kv_seq_lens=np.array([s.stored for s in self.running]),
            window_block_table=self.pages.window_block_table(rows),
            compressed_block_tables=self.pages.compressed_block_tables(rows),
            state_block_tables=self.pages.state_block_tables(rows),
        )
        return batch, counts


def step(session: ModelSession, groups: Sequence[DpGroup]) -> None:
    """One step of all groups, idle ones too, and what follows from it."""
    planned = [group.batch() for group in groups]
    outputs = session.step([batch for batch, _ in planned])  # raises, or has stored every row
    for group, (_, counts), output in zip(groups, planned, outputs, strict=True):
        chosen = choose_tokens(output.last_logits, [(s.sampling, len(s.answer)) for s in group.running])
        for sequence, count, token in list(zip(group.running, counts, chosen, strict=True)):
            sequence.stored += count
            group.pages.free_behind_window(sequence.row, sequence.stored)
            if sequence.stored == len(sequence.tokens):  # the row behind which the logits stand was the last one
                sequence.tokens.append(token)
                sequence.answer.append(token)
            if sequence.done:
                print(f"  {sequence.name} -> {sequence.answer}")
                group.release(sequence)


def main(directory: str) -> None:
    """Five requests on two DP groups; E waits until D is cancelled and takes its place."""
    with open_checkpoint(directory) as checkpoint:
        session = ModelSession.open(checkpoint, LAYOUT)
    with session:
        session.allocate(CapacityPlan(session.config, LAYOUT, CONTEXT, REQUESTS))  # the caches of a card
        groups = [DpGroup(session, dp_rank) for dp_rank in range(LAYOUT.dp)]
        first = [Conversation("A", [0, 17, 42], 3), Conversation("B", list(range(3, 23)), 2)]
        later = [Conversation("C", [0, 99], 3, Sampling(temperature=0.8, top_p=0.95, seed=1)),
                 Conversation("D", list(range(30, 60)), 9), Conversation("E", [0, 17, 42], 3)]  # fmt: skip
        for group, sequence in zip(groups, first, strict=True):
            group.admit(sequence)
        number = 0
        while any(group.running for group in groups):
            number += 1
            print(f"step {number}: {[[f'{s.name}@{s.stored}' for s in group.running] for group in groups]}")
            step(session, groups)
            if number == 1:  # requests arrive while others run
                groups[0].admit(later[0])
                groups[1].admit(later[1])
                groups[1].admit(later[2])  # no room yet
            if number == 3:  # somebody hangs up
                groups[1].release(later[1])
                groups[1].admit(later[2])
        assert first[0].answer == later[2].answer, "a request does not depend on its company"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", metavar="CHECKPOINT_DIRECTORY", help="in the released format")
    directory = parser.parse_args().checkpoint
    sys.exit(run_command(parser.prog, lambda: main(directory)))
