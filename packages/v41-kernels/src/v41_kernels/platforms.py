"""Where kernels can run: on the CPU, interpreted, or on an NPU. There is no fallback from one to the other.

What is looked at here needs no import of torch_npu; `device` looks at the rest in the worker process.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from v41_kernels.errors import PlatformError
from v41_kernels.pypto_install import PyptoInstall

_SET_UP = "CANN installed, and its set_env.sh sourced in this shell"
_DEVICE_COMPILER = ("bisheng", "ld.lld")
"""What pypto 0.2.0 calls to compile and link device code, by these names; without them it ends its process."""


@dataclass(frozen=True)
class Platform:
    """`cpu`, or `npu` with the index that torch gives the device."""

    name: str
    device_id: int = 0

    @property
    def is_device(self) -> bool:
        """Whether kernels run on a device instead of being interpreted."""
        return self.name == "npu"

    def __str__(self) -> str:
        return f"npu:{self.device_id}" if self.is_device else self.name


def find_platform(name: str, device_id: int, pypto: PyptoInstall) -> Platform:
    """The platform of that name, with what it needs outside of Python's processes.

    Errors: `PlatformError` for the first thing that is missing, with what to do about it.
    """
    if name not in ("cpu", "npu"):
        raise PlatformError("platform", name, "'cpu' or 'npu'")
    platform = Platform(name, device_id)
    if platform.is_device:
        _require_cann(pypto)
    elif device_id != 0:
        raise PlatformError("device id", device_id, "0 on platform 'cpu', which has no devices")
    return platform


def _require_cann(pypto: PyptoInstall) -> None:
    where, home = "platform 'npu'", os.environ.get("ASCEND_HOME_PATH")
    if not home:
        raise PlatformError(where, "no CANN: ASCEND_HOME_PATH is not set", _SET_UP)
    if not Path(home).is_dir():
        raise PlatformError(where, f"no directory {home}, which ASCEND_HOME_PATH names", _SET_UP)
    for program in _DEVICE_COMPILER:
        if shutil.which(program) is None:
            raise PlatformError(where, f"no {program} on PATH", f"{_SET_UP}: it adds the device compiler to PATH")
    if importlib.util.find_spec("torch_npu") is None:
        raise PlatformError(where, "no torch_npu", "torch_npu installed, in the version made for this torch and CANN")
    if not pypto.device_runtime.is_file():
        raise PlatformError(where, f"no {pypto.device_runtime}", "a pypto wheel with its device runtime")
