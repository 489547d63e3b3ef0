"""Where kernels can run: on the CPU, interpreted. A request for an NPU is answered with what stands against it."""

from __future__ import annotations

import importlib.util
import os

from v41_kernels.errors import PlatformError


def require_platform(platform: str) -> None:
    """Checks that kernels can be executed on `platform`. Errors: `PlatformError`; there is no fallback."""
    if platform == "cpu":
        return
    if platform != "npu":
        raise PlatformError("platform", platform, "'cpu' or 'npu'")
    if not os.environ.get("ASCEND_HOME_PATH"):
        raise PlatformError("platform 'npu'", "no CANN (ASCEND_HOME_PATH is not set)", "a machine with CANN and an NPU")
    if importlib.util.find_spec("torch_npu") is None:
        raise PlatformError("platform 'npu'", "no torch_npu", "a machine with CANN and an NPU")
    raise PlatformError("platform 'npu'", "a v41-kernels without a device path", "platform 'cpu', until there is one")
