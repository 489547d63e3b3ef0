"""Runs jobs on threads: started in order, a few at a time, within a budget of memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

from v41_loader.errors import ShardingError

R = TypeVar("R")

MAX_THREADS = 8

_MOST_THREADS = 1024
"""Each takes memory for a tensor, and one that cannot be started would end the work halfway."""

_JOBS_PER_THREAD = 4
"""Enough waiting that no thread idles while the caller looks at a result, and no more than that opened ahead."""


def thread_count(threads: int | None) -> int:
    """The threads that were asked for; by default two per processor, since they wait for disks, up to `MAX_THREADS`.

    Raises:
        ShardingError: fewer than one, or more than a machine has use for.
    """
    if threads is None:
        return min(2 * (os.cpu_count() or 1), MAX_THREADS)
    if not 1 <= threads <= _MOST_THREADS:
        raise ShardingError("threads", threads, f"at least 1, and at most {_MOST_THREADS}")
    return threads


@dataclass(frozen=True)
class Job(Generic[R]):
    """Something to do; `cost` is the memory it needs meanwhile, in bytes."""

    run: Callable[[], R]
    cost: int = 0


def run_jobs(jobs: Iterable[Job[R]], threads: int, budget: int = 0) -> Generator[R, None, None]:
    """The results of jobs as they are ready. `jobs` is consumed from the calling thread, little ahead of the work.

    Jobs under way cost at most `budget` bytes together; one that costs more runs alone. The first job to fail ends the
    others (those that have begun finish) and its error is raised. A caller that may leave off closes the generator
    (`contextlib.closing`): when that returns, no job runs any more.
    """
    with ThreadPoolExecutor(threads) as pool:
        costs: dict[Future[R], int] = {}
        ready: SimpleQueue[Future[R]] = SimpleQueue()

        def next_result() -> R:
            future = ready.get()
            del costs[future]
            return future.result()

        try:
            for job in jobs:
                while costs and (len(costs) >= threads * _JOBS_PER_THREAD or sum(costs.values()) + job.cost > budget):
                    yield next_result()
                future = pool.submit(job.run)
                costs[future] = job.cost
                future.add_done_callback(ready.put)
            while costs:
                yield next_result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
