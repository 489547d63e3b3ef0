"""Candidates whose selection differs: accepted and derived anew where scores allow it, otherwise rejected."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from v41_config import TINY, BoundOperator, ParallelLayout
from v41_goldens.candidate_run import Candidate, validate_candidate
from v41_goldens.errors import OperandError
from v41_goldens.fixtures import FixtureCase, operator_fixture
from v41_goldens.golden_run import Arguments, GoldenRun
from v41_goldens.judges import CutoffRule, logical_entries
from v41_goldens.operators import golden

CASE = FixtureCase(phase="decode", tokens=6, requests=6, layout=ParallelLayout(2))
SLACK = CutoffRule("any", slack=1e9)
"""Accepts every selection of visible entries: for choices that are worse by the scores."""


def entries_of(bound: BoundOperator, given: dict[str, object]) -> Tensor:
    rows, table, requests = (given[n] for n in ("topk_rows", "compressed_block_table", "token_to_req_indices"))
    assert isinstance(rows, Tensor)
    assert isinstance(table, Tensor)
    assert isinstance(requests, Tensor)
    return logical_entries(rows, table, requests)


def with_another_choice(entry_of: str, attend_to_it: bool = True) -> Candidate:
    """Like the golden, but that the first token with entries to spare takes another one for its last."""

    def candidate(bounds: Sequence[BoundOperator], arguments: Arguments) -> None:
        before = [{k: v.clone() if isinstance(v, Tensor) else v for k, v in given.items()} for given in arguments]
        name = bounds[0].spec.name
        golden(name).run_ranks(bounds, arguments)
        selections = [entries_of(bound, given) for bound, given in zip(bounds, arguments, strict=True)]
        lens = arguments[0]["compressed_lens"]
        assert isinstance(lens, Tensor)
        for row in selections:
            token = int((lens > TINY.index_topk + 2).int().argmax())
            free = next(e for e in itertools.count() if e not in row[token].tolist())
            last = int(lens[token]) if entry_of == "next token" else free
            row[token] = torch.cat([row[token][1:], row.new_tensor([last])]).sort().values
        if attend_to_it:
            for given, old in zip(arguments, before, strict=True):
                given.update(old)
            golden(name).run_ranks(bounds, arguments, selections)
        else:
            for given, entries in zip(arguments, selections, strict=True):
                rows, table, requests = (
                    given[n] for n in ("topk_rows", "compressed_block_table", "token_to_req_indices")
                )
                assert isinstance(rows, Tensor)
                assert isinstance(table, Tensor)
                assert isinstance(requests, Tensor)
                rows.copy_(
                    table.long()[requests.long().unsqueeze(1), entries.clamp(min=0) // 128] * 128
                    + entries.clamp(min=0) % 128
                )
                rows[entries < 0] = -1

    return candidate


def run(name: str, candidate: Candidate, cutoff: CutoffRule | None = None) -> GoldenRun:
    if cutoff is None:
        return validate_candidate(name, candidate, CASE)
    return validate_candidate(name, candidate, CASE, cutoff=cutoff)


NAMES = ["decode_attn_c2a_full", "decode_attn_c1a_full", "decode_c2a_full", "decode_c1a_full"]


@pytest.mark.parametrize("name", [*NAMES, "decode_c1a_reindex", "hierarchical_sparse_indexer_c1a_reindex"])
def test_the_golden_is_accepted(name: str) -> None:
    result = run(name, lambda bounds, arguments: golden(bounds[0].spec.name).run_ranks(bounds, arguments))
    assert result.passed, result.error


@pytest.mark.parametrize("name", NAMES)
def test_another_selection_needs_scores_that_allow_it(name: str) -> None:
    candidate = with_another_choice("worse")
    result = run(name, candidate)
    assert not result.passed
    assert result.error is not None
    assert "rank 0 topk_rows: " in result.error
    assert "entries worse than one left out" in result.error
    accepted = run(name, candidate, SLACK)
    assert accepted.passed, accepted.error


@pytest.mark.parametrize("name", NAMES)
def test_an_accepted_selection_has_an_output_of_its_own(name: str) -> None:
    """The golden's output, published with another selection, is wrong: the reference is derived for that selection."""
    result = run(name, with_another_choice("worse", attend_to_it=False), SLACK)
    assert not result.passed
    assert result.error is not None
    assert any(output in result.error for output in ("output_partial: ", "attn_output: ")), result.error


def test_an_entry_that_is_not_visible_is_never_accepted() -> None:
    result = run(NAMES[0], with_another_choice("next token", attend_to_it=False), SLACK)
    assert not result.passed
    assert result.error is not None
    assert "entries that the token does not see" in result.error or "entries named" in result.error


def test_selections_are_for_operators_that_choose() -> None:
    fixture = operator_fixture("decode_swa", CASE)
    selection = torch.full((6, TINY.index_topk), -1)
    with pytest.raises(OperandError, match="decode_swa selections: expected none"):
        golden("decode_swa").run_ranks(fixture.bounds, fixture.arguments, [selection] * 2)
    fixture = operator_fixture("decode_c2a_full", CASE)
    with pytest.raises(OperandError, match="decode_c2a_full selections: expected all 2 ranks"):
        golden("decode_c2a_full").run_ranks(fixture.bounds, fixture.arguments, [selection])
