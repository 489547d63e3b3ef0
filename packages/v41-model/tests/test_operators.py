"""The operators table: goldens by default, one replaced at a time, and rank code calls nothing else."""

from __future__ import annotations

import pytest
from torch import Tensor

from v41_config import AttentionMode, ConfigError, ParallelLayout
from v41_goldens.modes import ATTENTION
from v41_goldens.rms_norm import rms_norm
from v41_loader import Checkpoint
from v41_model.generation import Request, admit, advance
from v41_model.layout_table import OperatorTrace
from v41_model.operators import Operators
from v41_model.session import ModelSession


def test_goldens_by_default_and_one_replaced() -> None:
    def other(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps) * 2

    operators = Operators()
    assert operators.rms_norm is rms_norm
    assert {mode: operators.attention(mode) for mode in AttentionMode} == ATTENTION
    replaced = operators.replace(rms_norm=other)
    assert replaced.rms_norm is other
    assert replaced.gate is operators.gate
    assert operators.rms_norm is rms_norm, "the table it came from is unchanged"


def test_an_unknown_operator_is_refused() -> None:
    with pytest.raises(ConfigError, match="layer_norm"):
        Operators().replace(layer_norm=rms_norm)
    with pytest.raises(ConfigError, match=r"did you mean rms_norm\?"):
        Operators().replace(rmsnorm=rms_norm)


def test_every_operator_of_the_table_is_called(tiny_checkpoint: Checkpoint) -> None:
    """All six modes and every leaf, on every rank with tokens: a name that nothing calls could not be swapped."""
    session = ModelSession.open(tiny_checkpoint, ParallelLayout(2, 1))
    trace = OperatorTrace(session.world)
    session.operators = trace.observe(session.operators)
    advance(session, admit(session, [Request((3, 4, 5, 6), 1)]))
    for rank in (0, 1):
        assert {call.operator for call in trace.calls[rank]} == set(Operators.names())
