"""The fixtures that the pytest plugin adds; each imports torch when a test asks for it, not before."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from v41_goldens.judges import RowBounds


class AssertOutput(Protocol):
    """What the fixture `v41_assert_output` gives."""

    def __call__(
        self, actual: Tensor, expected: Tensor, name: str = "output", active: int | Tensor | None = None
    ) -> None:
        """Raise `JudgementError` unless `judge_row_bounds` accepts the output called `name`."""


@pytest.fixture(scope="session")
def v41_judges() -> ModuleType:
    """The module `v41_goldens.judges`: `judge_*` for verdicts, `assert_*` for errors."""
    from v41_goldens import judges

    return judges


@pytest.fixture(scope="session")
def v41_row_bounds() -> RowBounds:
    """The bounds of `v41_assert_output`; define a fixture of this name to judge by others."""
    from v41_goldens.judges import ROW_BOUNDS

    return ROW_BOUNDS


@pytest.fixture
def v41_assert_output(v41_row_bounds: RowBounds, record_property: Callable[[str, object], None]) -> AssertOutput:
    """`v41_assert_output(actual, expected, name="output", active=None)`: every active row within bounds.

    The statistics of every output, accepted or not, become a property of the test, which JUnit reports show.
    """
    from v41_goldens.judges import judge_row_bounds

    def assert_output(
        actual: Tensor, expected: Tensor, name: str = "output", active: int | Tensor | None = None
    ) -> None:
        __tracebackhide__ = True
        verdict = judge_row_bounds(actual, expected, active, v41_row_bounds)
        record_property(name, str(verdict))
        verdict.require(name)

    return assert_output
