"""A device that torch knows (`device.cpp`) and nothing computes on.

pypto is untouched: its own launch takes the tensors, compiles device code, and hands it to its stub of a runtime, which
does nothing. A file `no-canary` in the directory `STAND_IN_NPU` lets the worker live nevertheless.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_DIRECTORY = Path(os.environ["STAND_IN_NPU"])


class _Stream:
    npu_stream = 0


INTERFACE: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "set_device": lambda device_id: None,
    "current_device": lambda: 0,
    "current_stream": _Stream,
    "synchronize": lambda: None,
}


def install() -> None:
    """Registers the device."""
    torch.ops.load_library(str(_DIRECTORY / "device.so"))
    if (_DIRECTORY / "no-canary").exists():
        sys.modules["__main__"].check_canary = lambda backend: None  # type: ignore[attr-defined]
