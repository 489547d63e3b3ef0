"""Where the time of a run goes: seconds inside each operator of a table, without those of operators it calls."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from v41_model.operators import Operators


class OperatorTimes:
    """Processor seconds by operator. Ranks of a `LocalWorld` share it; they run one at a time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = 0.0

    @property
    def total(self) -> float:
        """Seconds inside any operator."""
        return sum(self.seconds.values())

    def table(self) -> Operators:
        """The goldens, each of them timed."""
        golden = Operators()
        return golden.replace(**{name: self._timed(name, getattr(golden, name)) for name in Operators.names()})

    def report(self, runs: int = 1, least: float = 0.01) -> str:
        """A line for each operator that takes at least the share `least`, per run, the longest first."""
        ranked = sorted(self.seconds.items(), key=lambda item: -item[1])
        return "\n".join(
            f"    {name:<36} {1000 * seconds / runs:10.2f} ms {100 * seconds / self.total:5.1f} %"
            for name, seconds in ranked
            if seconds >= least * self.total
        )

    def _timed(self, name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            before, self._inner = self._inner, 0.0
            began = time.process_time()
            try:
                return operator(*arguments, **keywords)
            finally:
                elapsed = time.process_time() - began
                self.seconds[name] += elapsed - self._inner
                self._inner = before + elapsed

        return call
