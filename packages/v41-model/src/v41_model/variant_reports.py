"""Kernels' variants for a device, which nothing here can judge: that they compile, or why not."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41_config import ModelConfig, OperatorError

if TYPE_CHECKING:
    from v41_kernels import Variant, VariantCompiler

__all__ = ["FAILED", "VariantReport", "report_variant"]

FAILED = "failed"
"""The status of a variant that does not compile. The other one, ``compiled, not verified``, is v41-kernels'."""


@dataclass(frozen=True)
class VariantReport:
    """One variant of one operator. It has no values, so it is neither accepted nor refused."""

    variant: str
    operator: str
    device: str
    status: str
    seconds: float
    architecture: str | None = None
    reason: str | None = None


def report_variant(compiler: VariantCompiler, variant: Variant, config: ModelConfig) -> VariantReport:
    """Compile a variant at a model's dimensions; if it does not, that is its status and reason.

    Errors: what stands in the way of every variant, such as a cache directory that cannot be written.
    """
    from v41_kernels.bench_operands import bind_for_bench
    from v41_kernels.errors import KernelExecutionError

    dims = bind_for_bench(variant.operator, config, 1).dims
    started = time.perf_counter()
    try:
        compiled = compiler.compile(variant.name, N=dims["N"], K=dims["K"])
    except (KernelExecutionError, OperatorError) as error:
        seconds, reason = time.perf_counter() - started, f"{type(error).__name__}: {error}"
        return VariantReport(variant.name, variant.operator, variant.device, FAILED, seconds, reason=reason)
    return VariantReport(
        variant.name, variant.operator, variant.device, compiled.status, compiled.seconds, compiled.architecture
    )
