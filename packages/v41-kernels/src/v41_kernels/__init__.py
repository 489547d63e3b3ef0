"""DeepSeek-V4.1-Flash: the operators as PyPTO kernels, compiled and executed on a CPU.

Importing this package imports neither pypto nor anything that writes files; pypto is loaded by the worker process.
"""

from v41_kernels.errors import (
    CalculatorBuildError,
    CanaryError,
    DeviceError,
    KernelCrashError,
    KernelError,
    KernelExecutionError,
    KernelTimeoutError,
    NoValuesError,
    PassVerificationError,
    PlatformError,
    PyptoInstallError,
)
from v41_kernels.executor import Executor, KernelRun
from v41_kernels.pass_report import PassCheck
from v41_kernels.pypto_install import PyptoInstall, find_pypto
from v41_kernels.registry import OPERATORS, KernelOperator
from v41_kernels.tiers import CHECKED_PASSES, Tier
from v41_kernels.variant_compiler import VariantCompiler
from v41_kernels.variants import NOT_VERIFIED, VARIANTS, CompiledVariant, Variant, variants_of

__all__ = [
    "CHECKED_PASSES",
    "NOT_VERIFIED",
    "OPERATORS",
    "VARIANTS",
    "CalculatorBuildError",
    "CanaryError",
    "CompiledVariant",
    "DeviceError",
    "Executor",
    "KernelCrashError",
    "KernelError",
    "KernelExecutionError",
    "KernelOperator",
    "KernelRun",
    "KernelTimeoutError",
    "NoValuesError",
    "PassCheck",
    "PassVerificationError",
    "PlatformError",
    "PyptoInstall",
    "PyptoInstallError",
    "Tier",
    "Variant",
    "VariantCompiler",
    "find_pypto",
    "variants_of",
]
