"""These kernels as a provider of operators, for a model that exchanges single operators inside its forward pass."""

from __future__ import annotations

from collections.abc import Mapping

from v41_config import BoundOperator, OperatorSpec
from v41_kernels.executor import Executor, KernelRun
from v41_kernels.registry import OPERATORS
from v41_kernels.tiers import Tier


class KernelProvider:
    """Operators in the destination form of the ABI; registered as `pypto` in the group `v41.operator_providers`.

    The worker ends with the provider. Errors of the constructor: those of `Executor`.
    """

    def __init__(
        self, tier: Tier | None = None, timeout: float = 600.0, *, platform: str = "cpu", device_id: int = 0
    ) -> None:
        """Takes the seconds that one launch may take, and the rest as `Executor` does."""
        self._executor = Executor(platform=platform, device_id=device_id, tier=tier, timeout=timeout)

    def names(self) -> tuple[str, ...]:
        """The operators there are, by the ABI's names."""
        return tuple(OPERATORS)

    def run(self, operator: str | OperatorSpec | BoundOperator, arguments: Mapping[str, object], /) -> KernelRun:
        """Runs one operator.

        Args:
            operator: its name, its contract, or its contract bound to a model, which then gives constants that are
                left out; otherwise those are the released model's.
            arguments: the contract's tensors by name, in CPU memory and contiguous, and scalars; a count that is left
                out means all rows. `out` and `inout` tensors are written in place, padding rows keep their bytes.

        Errors: those of `Executor.run`, with nothing written.
        """
        if isinstance(operator, BoundOperator):
            return self._executor.run(operator.spec.name, **{**operator.constants, **arguments})
        name = operator if isinstance(operator, str) else operator.name
        return self._executor.run(name, **arguments)

    def close(self) -> None:
        """Ends the worker; a later run starts another one."""
        self._executor.close()


def npu_provider() -> KernelProvider:
    """The kernels on the first NPU that is visible; registered as `pypto-npu`. Errors: those of `Executor`."""
    return KernelProvider(platform="npu")
