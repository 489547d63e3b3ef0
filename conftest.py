"""Settings for every test: torch's threads and first calls, and no time limit on a hypothesis example."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

# A busy machine makes an example slow, not wrong.
settings.register_profile("v41", parent=settings(), deadline=None)
settings.load_profile("v41")

THREADS = 1
FUNCTIONS = (torch.sqrt, torch.rsqrt, torch.exp, torch.log, torch.log1p, torch.sin, torch.cos, torch.sigmoid)


@pytest.fixture(scope="session", autouse=True)
def _settled_torch() -> None:
    """torch's vectorised functions have been seen wrong in a process's first multi-threaded call (model.md section 3).

    Calling each once on a single element, which is single-threaded, avoids it.
    """
    torch.set_num_threads(THREADS)
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for function in (
            torch.sqrt,
            torch.rsqrt,
            torch.exp,
            torch.log,
            torch.log1p,
            torch.sin,
            torch.cos,
            torch.sigmoid,
        ):
            function(one)
