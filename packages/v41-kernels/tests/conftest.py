"""One executor for the whole session: kernels share a worker, as they do in use.

A missing or wrong pypto fails every test that needs it; only where no wheel exists are those tests skipped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from v41_kernels import Executor


@pytest.fixture(scope="session")
def executor() -> Iterator[Executor]:
    if not sys.platform.startswith("linux"):
        pytest.skip("pypto has wheels for Linux only: no kernel was executed")
    with Executor(timeout=300.0) as shared:
        yield shared
