"""pytest plugin: judges, presets, batches and ranks as fixtures, for tests of kernels, engines and ports.

pytest finds it where this distribution is installed. It costs a test run nothing until a test asks for a fixture:
torch is imported only then.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Add the fixtures, which pytest has to be imported for."""
    config.pluginmanager.register(import_module("v41_goldens.pytest_fixtures"), "v41_goldens.pytest_fixtures")
