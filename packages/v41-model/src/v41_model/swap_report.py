"""What exchanged operators gave beside their goldens, call by call, and the first layer and tensor that differ."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from v41_goldens.judges import judge_equal_bits, judge_row_bounds
from v41_goldens.judges.verdict import Verdict

__all__ = ["SwapReport", "TensorCalls"]


@dataclass(frozen=True)
class TensorCalls:
    """All calls of one operator in one layer (None: entry and exit), seen through one of the tensors it writes.

    ``unequal`` of ``elements`` had other bits than the golden's; ``rejected`` calls were beyond what the judge
    accepts. ``order`` is that of the first call; ``first`` says where and how the first difference stood.
    """

    layer: int | None
    operator: str
    tensor: str
    order: int
    calls: int = 0
    elements: int = 0
    unequal: int = 0
    rejected: int = 0
    first: str = ""

    @property
    def place(self) -> str:
        """`layer 3 mhc_post out`."""
        layer = "entry or exit" if self.layer is None else f"layer {self.layer}"
        return f"{layer} {self.operator} {self.tensor}"


@dataclass
class SwapReport:
    """Collects comparisons in the order of the run.

    Equal bits are asked for first. Where floats differ, the goldens' judge of outputs in another arithmetic
    (:func:`v41_goldens.judges.judge_row_bounds`) decides whether they may; integers, masks and stored bytes may not.
    """

    seen: dict[tuple[int | None, str, str], TensorCalls] = field(default_factory=dict)

    def compare(
        self, layer: int | None, rank: int | None, operator: str, tensor: str, ours: Tensor, golden: Tensor
    ) -> None:
        """Enter one tensor of one call; ``rank`` made it, or no rank where None."""
        key = (layer, operator, tensor)
        known = self.seen.get(key) or TensorCalls(layer, operator, tensor, len(self.seen))
        bits = judge_equal_bits(ours, golden)
        verdict: Verdict = bits
        if not bits.accepted and golden.is_floating_point() and golden.element_size() > 1 and golden.dim() > 0:
            verdict = judge_row_bounds(ours, golden)
        first = known.first
        if not bits.accepted and not first:
            word = "within bounds" if verdict.accepted else "REJECTED"
            where = "outside of the ranks" if rank is None else f"rank {rank}"
            first = f"call {known.calls + 1}, {where}: {bits!r}; {word}: {verdict!r}"
        self.seen[key] = replace(
            known,
            calls=known.calls + 1,
            elements=known.elements + bits.elements,
            unequal=known.unequal + bits.unequal,
            rejected=known.rejected + (not verdict.accepted),
            first=first,
        )

    @property
    def first_difference(self) -> TensorCalls | None:
        """The first tensor, in the order of computation, with a bit that is not the golden's."""
        return next((calls for calls in self._in_order if calls.unequal), None)

    @property
    def operators(self) -> frozenset[str]:
        """The operators of which something was compared."""
        return frozenset(calls.operator for calls in self.seen.values())

    @property
    def accepted(self) -> bool:
        """Whether something was compared and every call was what the judges accept."""
        return bool(self.seen) and not any(calls.rejected for calls in self.seen.values())

    @property
    def _in_order(self) -> list[TensorCalls]:
        return sorted(self.seen.values(), key=lambda calls: calls.order)

    def lines(self) -> list[str]:
        """A line per operator and tensor, then the first difference and the first rejection."""
        totals: dict[tuple[str, str], list[int]] = {}
        for calls in self._in_order:
            total = totals.setdefault((calls.operator, calls.tensor), [0, 0, 0, 0])
            for place, count in enumerate((calls.calls, calls.elements, calls.unequal, calls.rejected)):
                total[place] += count
        lines = [
            f"{operator} {tensor}: {calls} calls, {unequal} of {elements} elements differ, {rejected} calls rejected"
            for (operator, tensor), (calls, elements, unequal, rejected) in totals.items()
        ]
        first = self.first_difference
        if first is None:
            return [*lines, "every bit is the golden's" if lines else "no exchanged operator was called"]
        lines.append(f"first difference: {first.place} ({first.first})")
        rejected_first = next((calls for calls in self._in_order if calls.rejected), None)
        if rejected_first is not None:
            lines.append(f"first rejection: {rejected_first.place} ({rejected_first.rejected} calls)")
        return lines
