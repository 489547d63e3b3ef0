"""The errors of this distribution: one class for each thing that can be wrong, all of them `KernelError`."""

from __future__ import annotations

from v41_config import V41Error


class KernelError(V41Error):
    """Base of everything that goes wrong between a caller's tensors and a kernel's result."""


class PyptoInstallError(KernelError):
    """The `pypto` that would be imported is missing, is the other project of that name, or has another version."""


class CalculatorBuildError(KernelError):
    """PyPTO's interpreter could not be built: no cmake binary, no compiler, or the build failed."""


class CanaryError(KernelError):
    """The canary kernel did not give the known answer, so no result of this interpreter can be trusted."""


class PlatformError(KernelError):
    """The requested platform is not there, or not supported."""


class KernelExecutionError(KernelError):
    """A kernel did not compile or did not run; no destination was written. `where` names the kernel and the tier."""


class KernelCrashError(KernelExecutionError):
    """The worker process died while it ran the kernel; the next run gets a fresh one."""


class KernelTimeoutError(KernelExecutionError):
    """The kernel took longer than allowed and its worker was stopped; the next run gets a fresh one."""


class PassVerificationError(KernelExecutionError):
    """After a compiler pass the kernel gave other values than before, or could not be interpreted any more."""


class DeviceError(KernelError):
    """A device description that is not there, or does not say what a roofline needs."""


class NoValuesError(KernelError):
    """Values were asked of a variant that is compiled and never run: nothing here could judge them."""
