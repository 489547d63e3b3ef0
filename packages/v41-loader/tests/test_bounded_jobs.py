"""Jobs on threads: order, budget, failure and leaving off."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from v41_loader.bounded_jobs import Job, run_jobs


class Running:
    """Counts what runs at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now = self.most = self.cost = self.most_cost = 0
        self.begun: list[int] = []

    def job(self, number: int, cost: int, seconds: float = 0.002) -> Job[int]:
        def run() -> int:
            with self._lock:
                self.begun.append(number)
                self.now, self.cost = self.now + 1, self.cost + cost
                self.most, self.most_cost = max(self.most, self.now), max(self.most_cost, self.cost)
            time.sleep(seconds)
            with self._lock:
                self.now, self.cost = self.now - 1, self.cost - cost
            return number

        return Job(run, cost)


def test_every_job_runs_once_and_begins_in_order() -> None:
    running = Running()
    results = list(run_jobs((running.job(number, 0) for number in range(100)), 1))
    assert results == running.begun == list(range(100))
    results = list(run_jobs((running.job(number, 0) for number in range(100)), 4))
    assert sorted(results) == list(range(100))
    assert 1 < running.most <= 4


def test_the_budget_is_kept() -> None:
    running = Running()
    list(run_jobs((running.job(number, 30) for number in range(40)), 8, budget=100))
    assert 30 < running.most_cost <= 90


def test_a_job_above_the_budget_runs_alone() -> None:
    running = Running()
    costs = [10, 10, 500, 10, 10]
    assert sorted(run_jobs((running.job(n, cost) for n, cost in enumerate(costs)), 4, budget=100)) == [0, 1, 2, 3, 4]
    assert running.most_cost == 500


def test_jobs_are_asked_for_little_ahead() -> None:
    running, asked = Running(), 0

    def jobs() -> Iterator[Job[int]]:
        nonlocal asked
        for number in range(1000):
            asked += 1
            yield running.job(number, 0, 0)

    with closing(run_jobs(jobs(), 2)) as results:
        next(results)
        assert asked <= 10
    assert asked <= 10


def fail() -> int:
    raise KeyError("wrong")


def test_the_first_failure_ends_the_rest() -> None:
    running = Running()

    def jobs() -> Iterator[Job[int]]:
        yield Job(fail)
        yield from (running.job(number, 0) for number in range(1000))

    with closing(run_jobs(jobs(), 2)) as results, pytest.raises(KeyError, match="wrong"):
        list(results)
    assert len(running.begun) < 20
    assert running.now == 0


def test_a_failure_to_make_jobs_ends_those_that_run() -> None:
    running = Running()

    def jobs() -> Iterator[Job[int]]:
        yield from (running.job(number, 0) for number in range(3))
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        list(run_jobs(jobs(), 2))
    assert running.now == 0


def test_leaving_off_waits_for_what_runs() -> None:
    running = Running()
    with closing(run_jobs((running.job(number, 0, 0.02) for number in range(100)), 3)) as results:
        next(results)
    assert running.now == 0
    assert len(running.begun) < 20
