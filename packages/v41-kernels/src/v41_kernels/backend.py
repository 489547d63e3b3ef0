"""What runs a jit entry inside the worker process: the interpreter on the CPU, or a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from v41_kernels.pass_report import PassCheck
from v41_kernels.tiers import Tier


class Measured(NamedTuple):
    """Seconds to compile an entry, operations of the graph that comes out, and seconds of a run where it was timed."""

    compile_seconds: float
    operations: int
    run_seconds: float | None


class Backend(Protocol):
    """One of the two. Not thread-safe, and of no use any more once a kernel has failed."""

    def run(
        self,
        where: str,
        entry: Callable[..., None],
        tensors: Mapping[str, Tensor],
        destinations: Sequence[str],
        tier: Tier | None,
        tolerance: Sequence[float] = (0.0, 0.0),
    ) -> tuple[PassCheck, ...]:
        """Compiles and executes `entry` on CPU tensors (by parameter name), writing `destinations` in place.

        `tier` and `tolerance` are of interpretation: the tier is None on a device. Gives the checks made after passes.
        Errors: `KernelExecutionError`, whose `where` is the given one, with no destination written.
        """
        ...

    def measure(
        self, where: str, entry: Callable[..., None], tensors: Mapping[str, Tensor], tier: Tier | None
    ) -> Measured:
        """Compiles `entry` and says what that took; no tensor is written. Errors: `KernelExecutionError`."""
        ...
