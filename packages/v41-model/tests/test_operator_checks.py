"""An exchanged operator whose output has another form is one error that names it, not a broadcast into wrong rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from v41_config import OperatorError, ParallelLayout
from v41_goldens.gate import GateOutput
from v41_loader import Checkpoint
from v41_model.errors import RankError
from v41_model.generation import Request, admit, advance
from v41_model.operator_checks import checked
from v41_model.operators import Operators
from v41_model.session import ModelSession


def _spoilt(name: str, spoil: Callable[[Any], Any]) -> Operators:
    golden = Operators()
    original = getattr(golden, name)
    return golden.replace(**{name: lambda *arguments: spoil(original(*arguments))})


def _one_row(output: Tensor) -> Tensor:
    return output[:1]


CASES: list[tuple[str, str, Callable[[Any], Any]]] = [
    ("attn_swa", "attn_swa", _one_row),
    ("attn_c1a_reuse", "attn_c1a_reuse", Tensor.bfloat16),
    ("rms_norm", "rms_norm", Tensor.float),
    ("mhc_pre", "mhc_pre", _one_row),
    ("mhc_post", "mhc_post", lambda out: out[:, :1]),
    ("mhc_mixes", "mhc_mixes comb", lambda out: (out[0], out[1], out[2][:1])),
    ("gate", "gate ids", lambda out: GateOutput(out.ids.long(), out.weights, out.biased_scores)),
    ("gate", "gate weights", lambda out: GateOutput(out.ids, out.weights[:, :1], out.biased_scores)),
    ("routed_experts", "routed_experts", Tensor.float),
    ("shared_expert", "shared_expert", _one_row),
    ("combine", "combine", Tensor.float),
    ("fp32_linear", "fp32_linear", Tensor.bfloat16),
    ("fp32_linear", "fp32_linear", _one_row),
]


@pytest.mark.parametrize(("name", "said", "spoil"), CASES, ids=[f"{said}-{i}" for i, (_, said, _) in enumerate(CASES)])
def test_an_output_of_another_form_names_its_operator(
    tiny_checkpoint: Checkpoint, name: str, said: str, spoil: Callable[[Any], Any]
) -> None:
    session = ModelSession.open(tiny_checkpoint, ParallelLayout(2, 1), operators=_spoilt(name, spoil))
    groups = admit(session, [Request((3, 4, 5, 6, 7), 1)])
    with pytest.raises(RankError) as caught:
        advance(session, groups, all_logits=True)
    cause = caught.value.__cause__
    assert isinstance(cause, OperatorError)
    assert cause.where == said


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(OperatorError, match="combine: expected a tensor"):
        checked("combine", None, (2, 3))  # type: ignore[arg-type]
    assert checked("x", torch.zeros(2, 3), (2, 3), torch.float32).shape == (2, 3)
