"""Running a golden on its fixture and judging what it left behind: what `v41-golden run` and `test_precision` do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from v41_config import STATE_CAPACITY, BoundOperator, ParallelLayout, operators
from v41_goldens.errors import OperandError
from v41_goldens.fixtures import FixtureCase, operator_fixture
from v41_goldens.judges import (
    Verdict,
    judge_equal_bits,
    judge_row_bounds,
    judge_storage,
    judge_untouched_rows,
    judge_zero_rows,
)
from v41_goldens.operators import golden
from v41_goldens.operators.call import Call
from v41_goldens.saved_tree import SavedTree, Wiring, load_tree, new_place, save_tree

_SHARDED = "_sharded"

UNBOUNDED = frozenset({"block_scores"})
"""Results that hold infinities: nothing is visible, or pinned."""

_ROUNDED_BY_GROUP = frozenset({"attn_output", "x_hc_out"})
"""Results behind a sum over ranks: another number of ranks adds in another order."""


@dataclass(frozen=True)
class Check:
    """A verdict about one tensor, named by wiring, rank and operand."""

    tensor: str
    verdict: Verdict


@dataclass(frozen=True)
class GoldenRun:
    """What was judged; `error` is the first failure with its statistics, None where there is none.

    `replayed` is the saved tree that operands came from, of the last wiring.
    """

    checks: tuple[Check, ...]
    replayed: SavedTree | None = field(default=None, repr=False)

    @property
    def passed(self) -> bool:
        """Whether every verdict accepts. A run that judged nothing has not passed."""
        return bool(self.checks) and all(check.verdict.accepted for check in self.checks)

    @property
    def error(self) -> str | None:
        """The first tensor that fails, with its statistics."""
        for check in self.checks:
            if not check.verdict:
                return f"{check.tensor}: expected {check.verdict.rule}; {check.verdict!r}"
        return None if self.checks else "nothing was judged"


Arguments = list[dict[str, object]]


def wirings(name: str, wiring: str = "both") -> dict[Wiring, str]:
    """The operators that `name` stands for: with a sharded form, one for each wiring.

    Raises:
        OperandError: the operator has no such wiring.
    """
    forms: dict[Wiring, str] = {"sharded": name} if name.endswith(_SHARDED) else {"replicated": name}
    if name + _SHARDED in operators():
        forms["sharded"] = name + _SHARDED
    if wiring == "both":
        return forms
    chosen: dict[Wiring, str] = {form: operator for form, operator in forms.items() if form == wiring}
    if not chosen:
        raise OperandError(f"{name} --wiring", wiring, f"one of {', '.join(forms)}, or both")
    return chosen


def validate(
    name: str,
    case: FixtureCase,
    *,
    preset: str = "tiny",
    epochs: int = 1,
    wiring: str = "both",
    save_data: Path | None = None,
    golden_data: Path | None = None,
) -> GoldenRun:
    """Run an operator's golden over all ranks of a case, in each wiring, and judge every tensor.

    Each epoch repeats the same inputs and must give the same bits; operands stay as they are, rows that are not active
    keep their sentinel or are zero, storage that no slot names keeps its bytes, numbers are finite; both wirings give
    the same rows; several ranks give what one gives, to the bit where nothing is summed over ranks and otherwise within
    the row bounds.

    Args:
        save_data: where operands and results are saved, `save_data/<wiring>`.
        golden_data: a saved tree to take operands from, and to compare with to the bit; `case` then only names the
            preset's config.

    Raises:
        OperandError: `epochs` below 1, or no such wiring.
        TreeError: a saved tree that cannot be used, or a place that cannot be written.
        V41Error: no such operator, or a layout or an extent that it cannot have.
    """
    if epochs < 1:
        raise OperandError("epochs", epochs, "at least 1")
    checks: list[Check] = []
    results: dict[Wiring, Arguments] = {}
    tree: SavedTree | None = None
    forms = wirings(name, wiring)
    if save_data is not None:
        for form in forms:
            new_place(save_data, form)  # before the first of them is written
    for form, operator in forms.items():
        if golden_data is None:
            fixture = operator_fixture(operator, case)
            layout, extents, bounds, before = case.layout, fixture.extents, fixture.bounds, fixture.arguments
            expected = None
        else:
            tree = load_tree(golden_data, operator, preset, case.config, form)
            layout, extents, bounds, before = tree.layout, tree.extents, tree.bounds, tree.arguments
            expected = tree.outputs
        after = run_golden(operator, bounds, before)
        for epoch in range(1, epochs):
            again = run_golden(operator, bounds, before)
            checks += _same(f"{form} epoch {epoch + 1}", operator, after, again)
        for rank, (bound, old, new) in enumerate(zip(bounds, before, after, strict=True)):
            checks += rank_checks(f"{form} rank {rank}", bound, rank, old, new)
        if expected is not None:
            checks += _same(f"{form} saved", operator, expected, after)
        results[form] = after
        if save_data is not None:
            outputs = [_outputs(operator, given) for given in after]
            save_tree(save_data, preset, form, operators()[operator], layout, extents, before, outputs)
    if golden_data is None:
        if len(results) == 2:
            checks += _wirings_agree(case, results["replicated"], results["sharded"])
        checks += _one_rank_agrees(name, case, results)
    return GoldenRun(tuple(checks), tree)


def run_golden(operator: str, bounds: Sequence[BoundOperator], before: Sequence[Mapping[str, object]]) -> Arguments:
    """The golden on copies of every rank's arguments, which it gives back."""
    arguments = copied(before)
    golden(operator).run_ranks(bounds, arguments)
    return arguments


def copied(arguments: Sequence[Mapping[str, object]]) -> Arguments:
    """Arguments with tensors of their own."""
    return [{k: v.clone() if isinstance(v, Tensor) else v for k, v in given.items()} for given in arguments]


def _outputs(operator: str, given: Mapping[str, object]) -> dict[str, Tensor]:
    return {name: tensor_of(given, name) for name in operators()[operator].destinations}


def tensor_of(given: Mapping[str, object], name: str) -> Tensor:
    """The tensor of that name among arguments."""
    value = given[name]
    assert isinstance(value, Tensor)
    return value


def _same(
    where: str, operator: str, expected: Sequence[Mapping[str, object]], actual: Sequence[Mapping[str, object]]
) -> Iterator[Check]:
    for rank, (left, right) in enumerate(zip(expected, actual, strict=True)):
        for name in operators()[operator].destinations:
            yield Check(f"{where} rank {rank} {name}", judge_equal_bits(tensor_of(right, name), tensor_of(left, name)))


def rank_checks(
    where: str, bound: BoundOperator, rank: int, old: Mapping[str, object], new: Mapping[str, object]
) -> Iterator[Check]:
    """What a rank's call must have left as it was, and that its numbers are finite."""
    call = Call.of(bound, old, rank)
    for tensor in bound.spec.tensors:
        before, after = tensor_of(old, tensor.name), tensor_of(new, tensor.name)
        name, active = f"{where} {tensor.name}", call.active_rows(tensor.dims[0])
        if tensor.direction == "in":
            yield Check(name, judge_equal_bits(after, before))
        if tensor.direction != "out":
            continue
        if bound.spec.name == "dispatch" and tensor.dims[0] == "R":
            active = int(tensor_of(new, "receive_counts").sum())
        if call.is_cleared(tensor.dims[0]):
            yield Check(name, judge_zero_rows(after, active))
        else:
            yield Check(name, judge_untouched_rows(after, before, active))
        if after.is_floating_point() and tensor.name not in UNBOUNDED and active:
            rows = after[:active].flatten(1) if after.dim() > 1 else after[:active, None]
            yield Check(name, judge_row_bounds(rows, rows))
    stored = {t.name: tensor_of(old, t.name) for t in bound.spec.tensors if t.direction == "inout"}
    if stored:
        yield Check(
            f"{where} storage", judge_storage(stored, {n: tensor_of(new, n) for n in stored}, _owned(call, stored))
        )


def _owned(call: Call, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Physical rows that slots, and the ring of the last tokens, name."""
    slots = {"window_kv": "window_slots", "compressed_kv": "compressed_slots", "index_key": "index_slots"}
    owned: dict[str, Tensor] = {}
    for name in stored:
        stem = name.removesuffix("_scale")
        if stem in slots:
            owned[name] = call["slots"] if "slots" in call.tensors else call[slots[stem]]
    if "state_cache" in stored:
        request, position = call["token_to_req_indices"].long(), call["position_ids"].long()
        behind = call["query_start_loc"].long()[request + 1] - torch.arange(len(request))
        block = call["state_block_table"][:, 0].long()[request]
        written = (behind <= STATE_CAPACITY) & (block >= 0) & (position >= 0)
        owned["state_cache"] = torch.where(written, block * STATE_CAPACITY + position % STATE_CAPACITY, -1)
    return owned


def _wirings_agree(case: FixtureCase, replicated: Arguments, sharded: Arguments) -> Iterator[Check]:
    slab = case.layout.slab_rows(case.tokens)
    for rank, (whole, own) in enumerate(zip(replicated, sharded, strict=True)):
        active = case.layout.active_rows(case.tokens, case.active(case.layout.dp_rank(rank)), rank)
        start = case.layout.tp_rank(rank) * slab
        for name in ("attn_output", "x_hc_out", "next_pre_mix"):
            expected = tensor_of(whole, name)[start : start + active]
            yield Check(
                f"sharded rank {rank} {name} of replicated", judge_equal_bits(tensor_of(own, name)[:active], expected)
            )


def _one_rank_agrees(name: str, case: FixtureCase, results: Mapping[Wiring, Arguments]) -> Iterator[Check]:
    """What several ranks of a TP group give, against the same batch on one."""
    spec = operators()[name.removesuffix(_SHARDED)]
    if case.layout.tp == 1 or "replicated" not in results or name + _SHARDED not in operators():
        return
    alone = replace(case, layout=ParallelLayout(1, case.layout.dp))
    fixture = operator_fixture(spec.name, alone)
    expected = run_golden(spec.name, fixture.bounds, fixture.arguments)
    for rank, given in enumerate(results["replicated"]):
        group = case.layout.dp_rank(rank)
        for tensor in spec.tensors:
            if tensor.direction == "in":
                continue
            actual, wanted = tensor_of(given, tensor.name), tensor_of(expected[group], tensor.name)
            if tensor.name in _ROUNDED_BY_GROUP:
                active = case.active(group)
                verdict: Verdict = judge_row_bounds(actual[:active].flatten(1), wanted[:active].flatten(1))
            else:
                verdict = judge_equal_bits(actual, wanted)
            yield Check(f"replicated rank {rank} {tensor.name} of one rank", verdict)
