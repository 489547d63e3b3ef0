"""Compiles variants for the A5, in a worker process that imports a private copy of pypto and executes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from v41_config import FLASH, OperatorError, find_operator
from v41_kernels.calculator import default_cache_directory
from v41_kernels.errors import KernelExecutionError
from v41_kernels.kernels.stages.tile_shapes import SCALE_PAIR
from v41_kernels.platforms import Platform
from v41_kernels.pypto_for_a5 import ARCHITECTURE, pypto_for_a5
from v41_kernels.pypto_install import find_pypto
from v41_kernels.variants import VARIANTS, CompiledVariant, Variant
from v41_kernels.worker_process import WorkerProcess, checked_timeout


class VariantCompiler:
    """Compiles variants one after the other. There is no way to run one: see `variants`. Not thread-safe.

    The worker starts with the first variant, and anew after a failure; the first start ever also copies pypto.
    """

    def __init__(
        self,
        *,
        timeout: float = 300.0,
        cache_directory: str | Path | None = None,
        variants: Mapping[str, Variant] = VARIANTS,
    ) -> None:
        """Takes the seconds that a launch may take; `cache_directory` holds the copy of pypto.

        Errors: `PyptoInstallError`; `KernelError` for a timeout that is none.
        """
        self._pypto = find_pypto()
        self._timeout = checked_timeout(timeout)
        self._cache_directory = Path(cache_directory or default_cache_directory())
        self._variants = variants
        self._worker: WorkerProcess | None = None

    def __enter__(self) -> VariantCompiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker and removes its files. A later compilation starts another one."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def compile(self, name: str, *, N: int, K: int) -> CompiledVariant:
        """Compiles all launches of a variant for weights `[N, K]`, and checks for which architecture that was.

        Errors: `OperatorError` for another name, or sizes that no weight has; `PyptoInstallError`;
        `KernelExecutionError` or a subclass if a launch does not compile, or not for the A5.
        """
        if name not in self._variants:
            raise OperatorError("variant", name, f"one of {', '.join(self._variants)}")
        variant = self._variants[name]
        sizes = find_operator(variant.operator).bind(FLASH, None, T=1, N=N, K=K).dims
        if not N:
            raise OperatorError(f"{variant.name}: N", N, "outputs")
        if not K or K % SCALE_PAIR:
            raise OperatorError(f"{variant.name}: K", K, f"a multiple of {SCALE_PAIR}")
        seconds, operations = 0.0, Counter[str]()
        for launch in variant.launches:
            where = f"variant {variant.name}, {launch.kernel.rsplit('.', 1)[-1]} (for the {variant.device})"
            request = {"where": where, "kernel": launch.kernel, "static": {**sizes, **launch.constants}}
            answer = self._ask(where, request)
            if answer["architecture"] != ARCHITECTURE:
                raise KernelExecutionError(where, f"compiled for {answer['architecture']}", ARCHITECTURE)
            seconds += answer["seconds"]
            operations.update(answer["operations"])
        return CompiledVariant(variant.name, variant.operator, ARCHITECTURE, seconds, dict(operations))

    def _ask(self, where: str, request: dict[str, Any]) -> dict[str, Any]:
        if self._worker is None:
            compiler = pypto_for_a5(self._pypto, self._cache_directory)
            self._worker = WorkerProcess(Platform("cpu"), None, compiler)
        try:
            return self._worker.ask(where, request, self._timeout)
        except BaseException:
            self._worker = None  # `ask` has stopped it
            raise
