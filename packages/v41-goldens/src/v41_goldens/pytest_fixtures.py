"""The functions that the pytest plugin makes fixtures of; each imports torch when a test asks for it, not before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from types import ModuleType

    import pytest
    from torch import Tensor

    from v41_config import ModelConfig, ParallelLayout
    from v41_goldens.fixtures import FixtureBatch, FixtureCase
    from v41_goldens.golden_run import GoldenRun
    from v41_goldens.judges import RelativeBudget, RowBounds
    from v41_goldens.rank_simulator import RankSimulator


class AssertOutput(Protocol):
    """What the fixture `v41_assert_output` gives."""

    def __call__(
        self, actual: Tensor, expected: Tensor, name: str = "output", active: int | Tensor | None = None
    ) -> None:
        """Raise `JudgementError` unless `judge_row_bounds` accepts the output called `name`."""


def v41_judges() -> ModuleType:
    """The module `v41_goldens.judges`: `judge_*` for verdicts, `assert_*` for errors."""
    from v41_goldens import judges

    return judges


def v41_row_bounds() -> RowBounds:
    """The bounds of `v41_assert_output`; define a fixture of this name to judge by others."""
    from v41_goldens.judges import ROW_BOUNDS

    return ROW_BOUNDS


def v41_relative_budget() -> RelativeBudget:
    """The budget of attention outputs by relative L2 and cosine, for `judge_relative_budget`."""
    from v41_goldens.judges import RELATIVE_BUDGET

    return RELATIVE_BUDGET


def v41_presets() -> Mapping[str, ModelConfig]:
    """Model configs by name: `v41_presets["tiny"]`."""
    from v41_config import PRESETS

    return PRESETS


def v41_layout(request: pytest.FixtureRequest) -> ParallelLayout:
    """The layout of the marker `v41_layouts`; one rank without it."""
    from v41_config import ParallelLayout

    tp, dp = getattr(request, "param", (1, 1))
    return ParallelLayout(tp, dp)


def v41_case(v41_layout: ParallelLayout) -> Callable[..., FixtureCase]:
    """`v41_case(**fields)`: a `FixtureCase` of `v41_layout`, with 33 tokens of which 31 are active, and 6 requests."""
    from v41_goldens.fixtures import FixtureCase

    def make(**fields: Any) -> FixtureCase:
        plain = {} if "tokens" in fields else {"active_tokens": 31}
        return FixtureCase(**{"layout": v41_layout, **plain, **fields})

    return make


def v41_batch() -> Callable[..., FixtureBatch]:
    """`v41_batch(case, dp_rank=0)`: metadata of a ragged batch, and caches with its history among NaN."""
    from v41_goldens.fixtures import fixture_batch

    return fixture_batch


def v41_rank_simulator() -> Callable[[ModelConfig, ParallelLayout], RankSimulator]:
    """`v41_rank_simulator(config, layout)`: the transports between ranks over lists of tensors."""
    from v41_goldens.rank_simulator import RankSimulator

    return RankSimulator


def v41_validate(
    v41_case: Callable[..., FixtureCase], v41_row_bounds: RowBounds, record_property: Callable[[str, object], None]
) -> Callable[..., GoldenRun]:
    """`v41_validate(name, candidate=None, wiring="both", **fields)`: judge an operator on the case of `v41_case`.

    `candidate(bounds, arguments)` writes into every rank's destinations and is compared with the golden by
    `v41_row_bounds`; without one the golden itself is judged. `assert result.passed, result.error` is left to the test.
    """
    from v41_goldens.candidate_run import validate_candidate
    from v41_goldens.golden_run import validate

    def run(name: str, candidate: Any = None, *, wiring: str = "both", **fields: Any) -> GoldenRun:
        case = v41_case(**fields)
        if candidate is None:
            result = validate(name, case, wiring=wiring)
        else:
            result = validate_candidate(name, candidate, case, wiring=wiring, row_bounds=v41_row_bounds)
        record_property(name, result.error or f"{len(result.checks)} verdicts accept")
        return result

    return run


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


PER_SESSION: tuple[Callable[..., object], ...] = (
    v41_judges,
    v41_row_bounds,
    v41_relative_budget,
    v41_presets,
    v41_batch,
    v41_rank_simulator,
)
PER_TEST: tuple[Callable[..., object], ...] = (v41_layout, v41_case, v41_validate, v41_assert_output)
