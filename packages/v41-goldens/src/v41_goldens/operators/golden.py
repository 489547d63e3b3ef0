"""A golden: the functional form, written by hand, and the destination form, generated from the operator's contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from v41_config import BoundOperator, OperatorSpec, find_operator
from v41_goldens.errors import OperandError
from v41_goldens.operators.call import Call, Results


class Ranks(Enum):
    """Whose calls an operator joins."""

    ONE = "one rank"
    TP_GROUP = "a TP group"
    WORLD = "all ranks"


@dataclass(frozen=True, eq=False)
class Golden:
    """One operator of the ABI.

    Attributes:
        spec: its contract.
        function: what computes it, in its own signature (see its docstring).
        ranks: whose calls it joins; transports join a TP group or the world.
    """

    spec: OperatorSpec
    function: Callable[..., Any]
    ranks: Ranks
    _results: Callable[[Sequence[Call]], list[Results]]

    @property
    def name(self) -> str:
        """The operator's name."""
        return self.spec.name

    def run(self, bound: BoundOperator, arguments: Mapping[str, object], rank: int = 0) -> None:
        """The destination form for one rank: `run_ranks` of an operator that joins no other rank's call.

        `rank` says which experts and which slab are its own.

        Raises:
            OperatorError, OperandError: see `run_ranks`.
        """
        if self.ranks is not Ranks.ONE and bound.layout.world_size > 1:
            raise OperandError(self.name, "the arguments of one rank", f"those of {self.ranks.value}: run_ranks")
        self._run([bound], [arguments], [rank])

    def run_ranks(
        self,
        bounds: Sequence[BoundOperator],
        arguments: Sequence[Mapping[str, object]],
        selections: Sequence[Tensor] | None = None,
    ) -> None:
        """Compute into the destinations of every rank: `out` and `inout` tensors, and of these the active rows alone.

        Rows at and behind the count keep their bytes, except in a slab of a batch that has one count for the whole TP
        group (`T_local` rows, count limited by `T`): there they are zero. Caches keep every row that no slot names.

        Args:
            bounds: `OperatorSpec.bind` of each rank, in rank order. Ranks of one layout; DP groups may differ in size.
            arguments: each rank's tensors and scalars by name; scalars with a default may be left out.
            selections: of an operator that chooses entries, what to attend to instead: each rank's logical entries,
                integers `[active rows, k]`, -1 behind them. For the reference of another, accepted choice.

        Raises:
            OperatorError: an argument breaks the contract.
            OperandError: another number of ranks than the layout has, or values that the golden is not defined for.
        """
        world = bounds[0].layout.world_size if bounds else 0
        if not bounds or len(bounds) != world or len(arguments) != world:
            raise OperandError(self.name, f"{len(arguments)} ranks", f"all {world} ranks of the layout")
        if selections is not None and len(selections) != world:
            raise OperandError(f"{self.name} selections", f"{len(selections)} ranks", f"all {world} ranks")
        if selections is not None and not {"topk_rows", "window_kv"} <= set(self.spec.destinations):
            raise OperandError(f"{self.name} selections", "given", "none: this attention chooses nothing")
        self._run(bounds, arguments, range(world), selections)

    def _run(
        self,
        bounds: Sequence[BoundOperator],
        arguments: Sequence[Mapping[str, object]],
        ranks: Sequence[int],
        selections: Sequence[Tensor] | None = None,
    ) -> None:
        for bound, given in zip(bounds, arguments, strict=True):
            if bound.spec != self.spec:
                raise OperandError(self.name, bound.spec.name, "arguments bound to this operator")
            if bound.layout != bounds[0].layout or bound.config != bounds[0].config:
                raise OperandError(self.name, "different layouts or models", "ranks of one layout and one model")
            bound.check(given)
            _check_tensors(bound, given)
        chosen = selections if selections is not None else [None] * len(bounds)
        calls = [Call.of(*call) for call in zip(bounds, arguments, ranks, chosen, strict=True)]
        size = {Ranks.ONE: 1, Ranks.TP_GROUP: bounds[0].layout.tp, Ranks.WORLD: len(calls)}[self.ranks]
        groups = [calls[start : start + size] for start in range(0, len(calls), size)]
        self._check_groups(groups)
        for start, group in zip(range(0, len(calls), size), groups, strict=True):
            # Without a token nothing is projected, read or written; only experts are asked even then.
            idle = self.ranks is not Ranks.WORLD and group[0].active == 0
            results = [{} for _ in group] if idle else self._results_of(group)
            for call, given, result in zip(group, arguments[start : start + size], results, strict=True):
                _write(call, given, result, idle)

    @torch.inference_mode()
    def _results_of(self, calls: Sequence[Call]) -> list[Results]:
        return self._results(calls)

    def _check_groups(self, groups: Sequence[Sequence[Call]]) -> None:
        if self.ranks is not Ranks.TP_GROUP:
            return
        for group in groups:
            shapes = {(call.active, tuple(call.bound.dims.items())) for call in group}
            if len(shapes) > 1:
                raise OperandError(self.name, sorted({call.active or 0 for call in group}),
                                   "one active count and equal extents in a TP group")  # fmt: skip


def _check_tensors(bound: BoundOperator, arguments: Mapping[str, object]) -> None:
    """What the contract leaves open: Torch tensors of one device, and caches that can be written by rows of bytes."""
    devices = set()
    for tensor in bound.spec.tensors:
        where, value = f"{bound.spec.name} {tensor.name}", arguments[tensor.name]
        if not isinstance(value, Tensor):
            raise OperandError(where, type(value).__name__, "a torch tensor")
        devices.add(value.device)
        if tensor.direction == "inout" and not value.is_contiguous():
            raise OperandError(where, f"strides {value.stride()}", "contiguous storage, which is updated in place")
    if len(devices) > 1:
        raise OperandError(bound.spec.name, sorted(map(str, devices)), "tensors of one device")


def _write(call: Call, arguments: Mapping[str, object], results: Results, idle: bool) -> None:
    for tensor in call.bound.spec.tensors:
        destination = arguments[tensor.name]
        assert isinstance(destination, Tensor)
        if tensor.direction != "out":
            continue
        rows = call.active_rows(tensor.dims[0])
        if not idle:
            result = results[tensor.name]
            rows = min(rows, len(result)) if tensor.dims[0] == "R" else rows
            assert result.shape == destination[:rows].shape, (call.bound.spec.name, tensor.name, result.shape)
            assert result.dtype == destination.dtype, (call.bound.spec.name, tensor.name, result.dtype)
            destination[:rows].copy_(result)
        if call.is_cleared(tensor.dims[0]):
            destination[rows:].zero_()


def each_rank(name: str, function: Callable[..., Any], results: Callable[[Call], Results]) -> Golden:
    """A golden that every rank computes by itself."""
    return Golden(find_operator(name), function, Ranks.ONE, lambda calls: [results(call) for call in calls])


def joint(
    name: str, function: Callable[..., Any], ranks: Ranks, results: Callable[[Sequence[Call]], list[Results]]
) -> Golden:
    """A golden over the calls of several ranks."""
    return Golden(find_operator(name), function, ranks, results)
