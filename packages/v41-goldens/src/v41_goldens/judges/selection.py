"""Validity of a top-k selection: what every token may look at, and that it looks at the best (model.md section 10)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from v41_config import BLOCK_ROWS
from v41_goldens.errors import OperandError
from v41_goldens.judges.cutoff import BY_INDEX, CutoffRule, cutoff_faults
from v41_goldens.judges.verdict import Fault, Verdict, faulty, first_index, kind, reasons_of
from v41_goldens.top_k import select_positions

FOREIGN_ENTRY = 2**31 - 1
"""What `logical_entries` gives for a physical row that is not the request's: an entry that no token sees."""

_RULE = "{k} entries a token: visible, inside its candidates, each once, ascending, -1 behind them; {cutoff}"


@dataclass(frozen=True, kw_only=True, repr=False)
class SelectionVerdict(Verdict):
    """Statistics of a selection.

    Attributes:
        rows: tokens judged.
        chosen: entries named.
        bad_rows: tokens with any fault.
        off_nominal_rows: tokens whose selection is not the golden's; may be accepted where ties or a slack
            allow it, and needs a reference of its own then (`rederive_attention`).
        worst_row: the token with the largest `deficit`, best score left out minus worst score chosen (None without
            tokens, -inf where nothing was left out).
        first_index: first faulty (token, column).
    """

    rows: int = 0
    chosen: int = 0
    bad_rows: int = 0
    off_nominal_rows: int = 0
    worst_row: int | None = None
    deficit: float = -math.inf
    first_index: tuple[int, ...] | None = None

    @property
    def statistics(self) -> str:
        worst = "" if self.worst_row is None else f", largest deficit {self.deficit:.3g} in row {self.worst_row}"
        return (
            f"{self.bad_rows} of {self.rows} rows bad, {self.off_nominal_rows} not nominal, {self.chosen} entries"
            f"{worst}"
        )


def judge_selection(
    selection: Tensor,
    scores: Tensor,
    visible: Tensor,
    k: int,
    *,
    candidates: Tensor | None = None,
    cutoff: CutoffRule = BY_INDEX,
) -> SelectionVerdict:
    """Entries that the token may look at, each once, ascending, -1 behind them, and by the reference's scores the best.

    Args:
        selection: INT32 or INT64 `[T, k]`, logical entries of the token's request (physical rows: `logical_entries`).
        scores: `[T, n]`, any float dtype; reference scores of all entries, what is not visible ignored. -inf marks
            an entry that cannot be chosen.
        visible: integers `[T]`, how many of the first entries each token sees.
        k: width of a selection.
        candidates: bool `[T, n]`, the entries a token is restricted to; None for no restriction.
        cutoff: which choices are right where scores are equal or, in another arithmetic, nearly so.

    Raises:
        OperandError: reference operands that do not fit together.
    """
    rows, entries = _check_reference(scores, visible, candidates)
    rule = _RULE.format(k=k, cutoff=cutoff)
    if selection.dtype not in (torch.int32, torch.int64) or selection.shape != (rows, k):
        reasons = (f"expected integers [{rows}, {k}], found {kind(selection)}",)
        return SelectionVerdict(rule=rule, reasons=reasons, rows=rows, bad_rows=rows)

    selected, seen = selection.long(), visible.long().clamp(0, entries).unsqueeze(1)
    live = selected >= 0
    causal = live & (selected < seen)
    entry = torch.arange(entries, device=scores.device)
    reachable = (entry < seen) & (scores != -math.inf)
    if candidates is not None:
        reachable &= candidates
    bad_scores = reachable & ~scores.isfinite()
    reachable &= ~bad_scores
    outside = causal & ~_at(reachable | bad_scores, selected, causal)
    repeated = _repeated(selected)

    # One column more, which takes whatever is not causal.
    chosen = torch.zeros(rows, entries + 1, dtype=torch.bool, device=scores.device)
    chosen = chosen.scatter_(1, selected.where(causal, entries), True)[:, :entries]
    found = cutoff_faults(chosen, reachable, scores, k, cutoff)
    empty = (found.missing > 0).unsqueeze(1) & (torch.arange(k, device=scores.device) == live.sum(1, keepdim=True))
    before = torch.cat([selected[:, :1], selected[:, :-1]], dim=1)
    nominal = select_positions(scores.where(reachable, -math.inf), k)

    faults = [
        Fault(bad_scores.any(1, keepdim=True), "reference scores that are not finite in rows"),
        Fault(selected < -1, "numbers below -1"),
        Fault(live & ~causal, "entries that the token does not see"),
        Fault(outside, "entries outside the candidates"),
        Fault(repeated, "entries named twice"),
        Fault(live & (selected < before), "entries out of order"),
        Fault(live & (before < 0), "entries behind a -1"),
        Fault(empty, "places left empty"),
    ]
    # Where an entry is wrong in itself, the one whose place it takes would make others look bad.
    sound = causal & ~faulty(faults, live).any(1, keepdim=True)
    faults += [
        Fault(_at(found.below, selected, sound), "entries worse than one left out"),
        Fault(_at(found.wrong_tie, selected, sound), "ties that do not take the lower index"),
    ]
    bad = faulty(faults, live)
    worst = int(found.deficit.argmax()) if rows else None
    return SelectionVerdict(
        rule=rule,
        reasons=reasons_of(faults),
        rows=rows,
        chosen=int(live.sum()),
        bad_rows=int(bad.any(1).sum()),
        off_nominal_rows=int(nominal.ne(selected).any(1).sum()),
        worst_row=worst,
        deficit=-math.inf if worst is None else float(found.deficit[worst]),
        first_index=first_index(bad),
    )


def assert_selection(
    selection: Tensor,
    scores: Tensor,
    visible: Tensor,
    k: int,
    name: str,
    *,
    candidates: Tensor | None = None,
    cutoff: CutoffRule = BY_INDEX,
) -> None:
    """Raise `JudgementError` unless `judge_selection` accepts the selection called `name`."""
    judge_selection(selection, scores, visible, k, candidates=candidates, cutoff=cutoff).require(name)


def logical_entries(topk_rows: Tensor, block_table: Tensor, token_to_req: Tensor) -> Tensor:
    """Physical compressed rows of a selection as entries of each token's request.

    Args:
        topk_rows: integers `[T, k]`, physical rows; negative ones are kept.
        block_table: integers `[B, pages]`, the request's physical blocks, -1 where a page is not there.
        token_to_req: integers `[T]`, the batch row of each token.

    Returns:
        INT64 `[T, k]`; `FOREIGN_ENTRY` where the row lies in none of the request's blocks.
    """
    rows, table = topk_rows.long(), block_table.long()
    if table.shape[1] == 0:
        return rows.where(rows < 0, FOREIGN_ENTRY)
    order = table.argsort(dim=1)
    request = token_to_req.long()
    blocks = table.gather(1, order)[request]
    at = torch.searchsorted(blocks, rows // BLOCK_ROWS).clamp_max_(table.shape[1] - 1)
    page = order[request].gather(1, at)
    entries = (page * BLOCK_ROWS + rows % BLOCK_ROWS).where(blocks.gather(1, at) == rows // BLOCK_ROWS, FOREIGN_ENTRY)
    return rows.where(rows < 0, entries)


def _check_reference(scores: Tensor, visible: Tensor, candidates: Tensor | None) -> tuple[int, int]:
    if scores.dim() != 2 or not scores.dtype.is_floating_point:
        raise OperandError("judge_selection scores", (scores.dtype, tuple(scores.shape)), "floating point [T, n]")
    if visible.shape != scores.shape[:1] or visible.dtype.is_floating_point:
        raise OperandError("judge_selection visible", (visible.dtype, tuple(visible.shape)),
                           f"integers [{len(scores)}]")  # fmt: skip
    if candidates is not None and (candidates.dtype != torch.bool or candidates.shape != scores.shape):
        raise OperandError("judge_selection candidates", (candidates.dtype, tuple(candidates.shape)),
                           f"bool {list(scores.shape)}")  # fmt: skip
    return scores.shape[0], scores.shape[1]


def _at(mask: Tensor, selected: Tensor, inside: Tensor) -> Tensor:
    """Bool `[T, k]`: `mask [T, n]` at the selected entries, false where they are not `inside`."""
    if mask.shape[1] == 0:
        return torch.zeros_like(inside)
    return mask.gather(1, selected.where(inside, 0)) & inside


def _repeated(selected: Tensor) -> Tensor:
    """Bool `[T, k]`: entries named before in the same row."""
    ordered, order = selected.sort(dim=1, stable=True)
    again = torch.zeros_like(ordered, dtype=torch.bool)
    again[:, 1:] = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    return torch.zeros_like(again).scatter_(1, order, again)
