"""Stands for torch_npu where there is none; nothing about a device can be learned from it.

The device is `registered_npu` if its library was built into the directory `STAND_IN_NPU`, else `interpreted_npu`.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

_built = (Path(os.environ["STAND_IN_NPU"]) / "device.so").exists()
_device = importlib.import_module("registered_npu" if _built else "interpreted_npu")

# pypto would load its device runtime now, and with it libraries of CANN, which are not here: it is to load its stub.
os.environ.pop("ASCEND_HOME_PATH")


def get_npu_format(tensor: Tensor) -> int:
    """ND."""
    assert tensor.device.type == "npu"
    return 2


torch.utils.rename_privateuse1_backend("npu")  # type: ignore[attr-defined]
npu = ModuleType("torch.npu")
for _name, _function in _device.INTERFACE.items():
    setattr(npu, _name, _function)
torch._register_device_module("npu", npu)
_device.install()
