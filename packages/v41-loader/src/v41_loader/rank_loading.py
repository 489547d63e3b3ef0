"""Brings what one rank holds into memory, tensor by tensor, for serving: from a checkpoint or from shards.

Threads read ahead of the caller, within a budget of bytes. Every tensor has memory of its own, exactly as large as it
is, that nothing else reads or writes again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from v41_config.parallel_layout import ParallelLayout
from v41_loader.bounded_jobs import Job, run_jobs, thread_count
from v41_loader.errors import ShardingError

HOST_BUDGET = 256 << 20
"""Bytes of tensors that are being read, or wait for the caller, where nothing else is said."""


@dataclass(frozen=True)
class RankRead:
    """One tensor of a rank: `read` gives it, on the CPU, and needs `cost` bytes for it."""

    name: str
    cost: int
    read: Callable[[], torch.Tensor]


class RankSource(Protocol):
    """What has the tensors of ranks: a `Checkpoint` or a `ShardedCheckpoint`."""

    def rank_reads(self, layout: ParallelLayout, rank: int) -> Sequence[RankRead]:
        """All that a rank holds, in file order; may be read from several threads."""


def load_rank(
    checkpoint: RankSource,
    layout: ParallelLayout,
    rank: int,
    device: torch.device | str = "cpu",
    host_budget: int = HOST_BUDGET,
    threads: int | None = None,
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """What one rank holds, by the checkpoint's global names: its heads, output groups and vocabulary rows by TP, its
    experts by EP, the rest whole; in its stored dtypes, contiguous, on `device`.

    Tensors come as they are ready, about in file order. Whoever leaves off early closes the generator; when that
    returns, nothing is read any more.

    Args:
        checkpoint: an open `Checkpoint`, or a `ShardedCheckpoint` that was made for this layout.
        host_budget: bytes of host memory for tensors under way: being read, or read and not yet taken by the caller. A
            tensor that is larger is read alone.
        threads: threads that read; two per processor by default, at most `MAX_THREADS`.

    Raises:
        LayoutError: the layout does not divide the model, or has no such rank.
        ShardingError: the shards were made for another layout, the budget is no number of bytes, fewer than one
            thread, or a device that is not there.
        MissingRankError: the shards lack the rank.
        CheckpointError: while it is iterated, as `Checkpoint.part` and `ShardedCheckpoint.tensor`.
    """
    if type(host_budget) is not int or host_budget < 0:
        raise ShardingError("host_budget", host_budget, "a number of bytes")
    return _loaded(checkpoint.rank_reads(layout, rank), _usable(device), host_budget, thread_count(threads))


def _usable(device: torch.device | str) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, ModuleNotFoundError) as error:  # torch has no type of its own for it
        raise ShardingError(
            "device", str(device), f"a device that torch can use here ({str(error).splitlines()[0]})"
        ) from error


def _loaded(
    reads: Sequence[RankRead], device: torch.device, budget: int, threads: int
) -> Generator[tuple[str, torch.Tensor], None, None]:
    jobs = (Job(partial(_named, item), item.cost) for item in reads)
    with closing(run_jobs(jobs, threads, budget)) as loaded:
        for name, tensor in loaded:
            # As bytes: some devices do not copy E8M0 and E4M3, and none may take their numbers for something to round.
            yield name, tensor.view(torch.uint8).to(device).view(tensor.dtype)


def _named(item: RankRead) -> tuple[str, torch.Tensor]:
    return item.name, item.read()


def rank_tensors(checkpoint: RankSource, layout: ParallelLayout, rank: int) -> dict[str, torch.Tensor]:
    """All that one rank holds at once, on the CPU, in file order; errors as `load_rank`."""
    reads = checkpoint.rank_reads(layout, rank)
    loaded = dict(_loaded(reads, torch.device("cpu"), sum(item.cost for item in reads), thread_count(None)))
    return {item.name: loaded[item.name] for item in reads}
