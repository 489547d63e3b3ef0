"""The canary: a kernel with a known answer, run before any other. It dies when arguments do not arrive."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import torch

from v41_kernels.errors import CanaryError
from v41_kernels.tiers import Tier

if TYPE_CHECKING:
    from v41_kernels.backend import Backend

_KERNEL = "v41_kernels.kernels.canary"


def check_canary(backend: Backend) -> None:
    """Runs the canary kernel. Errors: `CanaryError` if the answer is not the known one."""
    kernel = importlib.import_module(_KERNEL)
    shape = (kernel.ROWS, kernel.COLUMNS)
    x = torch.arange(1, 1 + kernel.ROWS * kernel.COLUMNS, dtype=torch.float32).view(shape)
    out = torch.full(shape, torch.nan)
    backend.run("canary", kernel.make_entry(), {"x": x, "out": out}, ["out"], Tier.GRAPH)
    known = torch.arange(3, 3 + 2 * x.numel(), 2, dtype=torch.float32).view(shape)
    if not torch.equal(out, known):
        saw_zeros = torch.equal(out, torch.ones(shape))
        found = "the answer for x = 0: the tensors do not arrive" if saw_zeros else out.tolist()
        raise CanaryError("canary kernel", found, "2 x + 1 for x = 1, 2, ...")
