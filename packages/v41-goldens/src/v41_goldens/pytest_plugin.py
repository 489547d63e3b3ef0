"""pytest plugin: judges, presets, batches and ranks as fixtures, for tests of kernels, engines and ports.

pytest finds it where this distribution is installed. It costs a test run nothing until a test asks for a fixture:
torch is imported only then.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

LAYOUTS_MARKER = "v41_layouts"


def pytest_configure(config: pytest.Config) -> None:
    """Add the marker, and the fixtures, which pytest has to be imported for."""
    config.addinivalue_line(
        "markers", f"{LAYOUTS_MARKER}(*pairs): run a test that takes `v41_layout` for each `(tp, dp)`"
    )
    config.pluginmanager.register(_fixtures(), "v41_goldens.pytest_fixtures")


def _fixtures() -> ModuleType:
    import pytest

    from v41_goldens import pytest_fixtures

    holder = ModuleType(pytest_fixtures.__name__)
    for function in pytest_fixtures.PER_SESSION:
        setattr(holder, function.__name__, pytest.fixture(scope="session")(function))
    for function in pytest_fixtures.PER_TEST:
        setattr(holder, function.__name__, pytest.fixture(function))
    return holder


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each pair of `@pytest.mark.v41_layouts((1, 1), (2, 2), (4, 1))`, named `[2-2]`."""
    pairs = [pair for marker in metafunc.definition.iter_markers(LAYOUTS_MARKER) for pair in marker.args]
    if pairs:
        _check_pairs(metafunc.definition.nodeid, pairs)
        ids = ["-".join(map(str, pair)) for pair in pairs]
        metafunc.parametrize("v41_layout", pairs, indirect=True, ids=ids)


def _check_pairs(where: str, pairs: Sequence[object]) -> None:
    from v41_goldens.errors import OperandError

    for pair in pairs:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(type(size) is int for size in pair)):
            raise OperandError(f"{where}: {LAYOUTS_MARKER}", pair, "pairs (tp, dp), such as (2, 2)")
