"""Somebody else's operator on the golden's operands, judged against the golden."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from v41_config import AttentionMode, BoundOperator
from v41_goldens.capture import Capture, layer_key
from v41_goldens.fixtures import FixtureCase, OperatorFixture, operator_fixture
from v41_goldens.fixtures.operator_fixture import mode_of
from v41_goldens.golden_run import (
    UNBOUNDED,
    Arguments,
    Check,
    GoldenRun,
    copied,
    rank_checks,
    run_golden,
    tensor_of,
    wirings,
)
from v41_goldens.indexer import IndexQueries, select_entries
from v41_goldens.judges import (
    ANY_TIE,
    ROW_BOUNDS,
    CutoffRule,
    RowBounds,
    judge_equal_bits,
    judge_row_bounds,
    judge_selection,
    logical_entries,
    reference_index_scores,
)
from v41_goldens.modes import first_layer
from v41_goldens.operators import golden
from v41_goldens.operators.call import Call
from v41_goldens.operators.operand_context import operand_context

Candidate = Callable[[Sequence[BoundOperator], Arguments], object]
"""An operator over all ranks: writes into the destinations among each rank's arguments."""

_SELECTION = "topk_rows"


def validate_candidate(
    name: str,
    candidate: Candidate,
    case: FixtureCase,
    *,
    wiring: str = "both",
    row_bounds: RowBounds = ROW_BOUNDS,
    cutoff: CutoffRule = ANY_TIE,
) -> GoldenRun:
    """Run somebody else's operator on the golden's operands, and judge what it leaves behind against the golden.

    Active rows of floating-point results within `row_bounds`; codes, scales, ids and masks to the bit; operands,
    inactive rows and storage as `validate` has them. A selection of its own has to be valid and, by the golden's
    scores, the best within `cutoff`; where it is another than the golden's, the golden's results are derived anew for
    that selection, from the golden's own caches and nothing else of the candidate.

    Args:
        candidate: `candidate(bounds, arguments)`, one of each for every rank, in each wiring.

    Raises:
        V41Error: no such operator or wiring, or a layout that it cannot have.
    """
    checks: list[Check] = []
    for form, operator in wirings(name, wiring).items():
        fixture = operator_fixture(operator, case)
        expected = run_golden(operator, fixture.bounds, fixture.arguments)
        actual = copied(fixture.arguments)
        candidate(fixture.bounds, actual)
        if _SELECTION in fixture.spec.destinations:
            found, selections = _judge_selections(form, fixture, expected, actual, cutoff)
            checks += found
            if not all(check.verdict for check in found):
                continue  # no reference follows from a selection that is wrong
            if selections is not None:
                expected = copied(fixture.arguments)
                golden(operator).run_ranks(fixture.bounds, expected, selections)
        for rank, (bound, old, new, right) in enumerate(
            zip(fixture.bounds, fixture.arguments, actual, expected, strict=True)
        ):
            where = f"{form} rank {rank}"
            checks += rank_checks(where, bound, rank, old, new)
            checks += _result_checks(where, Call.of(bound, old, rank), new, right, row_bounds)
    return GoldenRun(tuple(checks))


def _result_checks(
    where: str, call: Call, actual: Mapping[str, object], expected: Mapping[str, object], row_bounds: RowBounds
) -> Iterator[Check]:
    for tensor in call.bound.spec.tensors:
        if tensor.direction == "in" or tensor.name == _SELECTION:
            continue
        rows = call.active_rows(tensor.dims[0])
        found, wanted = tensor_of(actual, tensor.name)[:rows], tensor_of(expected, tensor.name)[:rows]
        if tensor.dtype in ("bfloat16", "float32") and tensor.direction == "out" and tensor.name not in UNBOUNDED:
            shape = (len(wanted), -1) if wanted.numel() else (0, 1)
            verdict = judge_row_bounds(found.reshape(shape), wanted.reshape(shape), None, row_bounds)
            yield Check(f"{where} {tensor.name}", verdict)
        else:
            yield Check(f"{where} {tensor.name}", judge_equal_bits(found, wanted))


def _judge_selections(
    form: str, fixture: OperatorFixture, expected: Arguments, actual: Arguments, cutoff: CutoffRule
) -> tuple[list[Check], list[Tensor] | None]:
    """Verdicts on every rank's choice, and the choices where any of them is another than the golden's."""
    mode = mode_of(fixture.spec)
    assert mode is not None
    checks, selections, differ = [], [], False
    for rank, (bound, given, right) in enumerate(zip(fixture.bounds, actual, expected, strict=True)):
        call = Call.of(bound, right, rank)
        rows = call.active or 0
        chosen, wanted = tensor_of(given, _SELECTION)[:rows], tensor_of(right, _SELECTION)[:rows]
        requests = call["token_to_req_indices"]
        entries = logical_entries(chosen, call["compressed_block_table"], requests)
        visible, width = call["compressed_lens"], chosen.shape[1]
        scores = _reference_scores(call, mode, right)
        verdict = judge_selection(entries, scores, visible, width, cutoff=cutoff)
        checks.append(Check(f"{form} rank {rank} {_SELECTION}", verdict))
        selections.append(entries)
        differ = differ or not torch.equal(chosen, wanted)
    joins_attention = {"output_partial", "attn_output"} & set(fixture.spec.destinations)
    return checks, selections if differ and joins_attention else None


@torch.inference_mode()
def _reference_scores(call: Call, mode: AttentionMode, expected: Mapping[str, object]) -> Tensor:
    """The golden's scores `[active rows, n]`, from its own caches as it left them."""
    layer = first_layer(call.config, mode, call.bound.spec.name)
    context = operand_context(call, layer)
    if "index_q" in call.tensors:
        alone = dataclasses.replace(context, capture=Capture())
        select_entries(alone, layer, IndexQueries(call["index_q"], call["index_weights"]))
        assert alone.capture is not None
        nothing = torch.empty(call.active or 0, 0, dtype=torch.bfloat16)
        return alone.capture.tensors.get(layer_key(layer.layer_id, "index_score"), nothing)
    x = call["x"] if "x" in call.tensors else tensor_of(expected, "attn_input")[: call.active]
    return reference_index_scores(context, layer, call.attention(), x)
