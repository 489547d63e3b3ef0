"""A kernel that needs more memory than the machine has."""

import os
from collections.abc import Callable


def make_entry(*, D: int) -> Callable[..., None]:
    everything = bytearray(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 3 // 4)
    raise AssertionError(f"allocated {len(everything)} bytes, D = {D}")
