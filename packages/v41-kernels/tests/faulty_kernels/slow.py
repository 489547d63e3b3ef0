"""A kernel that takes its time, and then fails."""

import time
from collections.abc import Callable


def make_entry(*, D: int, eps: float) -> Callable[..., None]:
    time.sleep(1.0)
    raise ValueError(f"slow and wrong, D = {D}, eps = {eps}")
