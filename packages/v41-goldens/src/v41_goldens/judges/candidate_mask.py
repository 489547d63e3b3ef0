"""Validity of a candidate mask: whole blocks, the newest one, and otherwise the best (model.md section 11)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from v41_config import ModelConfig
from v41_goldens.candidate_blocks import candidate_blocks, entries_of_blocks
from v41_goldens.errors import OperandError
from v41_goldens.judges.cutoff import BY_INDEX, CutoffRule, cutoff_faults
from v41_goldens.judges.verdict import Fault, Verdict, faulty, first_index, kind, reasons_of

_RULE = (
    "the best {keep} blocks of {size} entries a token, the block of its newest visible entry among them, none without "
    "a visible entry; {cutoff}"
)


@dataclass(frozen=True, kw_only=True, repr=False)
class CandidateMaskVerdict(Verdict):
    """Statistics of a candidate mask.

    Attributes:
        rows: tokens judged.
        kept: blocks kept, over all tokens.
        bad_rows: tokens with any fault.
        off_nominal_rows: tokens whose blocks are not the golden's; may be accepted where ties or a slack
            allow it.
        first_index: first faulty (token, block).
    """

    rows: int = 0
    kept: int = 0
    bad_rows: int = 0
    off_nominal_rows: int = 0
    first_index: tuple[int, ...] | None = None

    @property
    def statistics(self) -> str:
        return f"{self.bad_rows} of {self.rows} rows bad, {self.off_nominal_rows} not nominal, {self.kept} blocks kept"


def judge_candidate_blocks(
    kept: Tensor,
    scores: Tensor,
    visible: Tensor,
    config: ModelConfig,
    cutoff: CutoffRule = BY_INDEX,
) -> CandidateMaskVerdict:
    """The best blocks of each token by the reference's scores, its newest one among them, and none that it cannot see.

    Args:
        kept: bool `[T, blocks]`, at least as many blocks as `n` entries fill.
        scores: `[T, n]`, any float dtype; reference scores of all entries, what is not visible ignored.
        visible: integers `[T]`, how many of the first entries each token sees.
        cutoff: which blocks are right where scores are equal or, in another arithmetic, nearly so.

    Raises:
        OperandError: reference operands that do not fit together.
    """
    rule = _rule(config, cutoff)
    rows, blocks = len(scores), -(-scores.shape[1] // config.candidate_block_size)
    if kept.dtype != torch.bool or kept.dim() != 2 or len(kept) != rows or kept.shape[1] < blocks:
        reasons = (f"expected torch.bool [{rows}, {blocks} or more], found {kind(kept)}",)
        return CandidateMaskVerdict(rule=rule, reasons=reasons, rows=rows, bad_rows=rows)
    return _judge(kept, torch.zeros_like(kept), scores, visible, config, rule, cutoff)


def judge_candidate_mask(
    mask: Tensor,
    scores: Tensor,
    visible: Tensor,
    config: ModelConfig,
    cutoff: CutoffRule = BY_INDEX,
) -> CandidateMaskVerdict:
    """What `judge_candidate_blocks` accepts, as a mask of entries that keeps each block whole or not at all.

    Args:
        mask: bool `[T, n]`.
    """
    size = config.candidate_block_size
    rule = f"whole blocks; {_rule(config, cutoff)}"
    if mask.dtype != torch.bool or mask.shape != scores.shape:
        reasons = (f"expected torch.bool {list(scores.shape)}, found {kind(mask)}",)
        return CandidateMaskVerdict(rule=rule, reasons=reasons, rows=len(scores), bad_rows=len(scores))
    kept = torch.nn.functional.pad(mask, (0, -mask.shape[1] % size)).unflatten(1, (-1, size)).any(2)
    partial = entries_of_blocks(kept, mask.shape[1], config) & ~mask
    broken = torch.nn.functional.pad(partial, (0, -mask.shape[1] % size)).unflatten(1, (-1, size)).any(2)
    return _judge(kept, broken, scores, visible, config, rule, cutoff)


def assert_candidate_blocks(
    kept: Tensor,
    scores: Tensor,
    visible: Tensor,
    config: ModelConfig,
    name: str,
    cutoff: CutoffRule = BY_INDEX,
) -> None:
    """Raise `JudgementError` unless `judge_candidate_blocks` accepts the blocks called `name`."""
    judge_candidate_blocks(kept, scores, visible, config, cutoff).require(name)


def assert_candidate_mask(
    mask: Tensor,
    scores: Tensor,
    visible: Tensor,
    config: ModelConfig,
    name: str,
    cutoff: CutoffRule = BY_INDEX,
) -> None:
    """Raise `JudgementError` unless `judge_candidate_mask` accepts the mask called `name`."""
    judge_candidate_mask(mask, scores, visible, config, cutoff).require(name)


def _judge(
    kept: Tensor,
    partial: Tensor,
    scores: Tensor,
    visible: Tensor,
    config: ModelConfig,
    rule: str,
    cutoff: CutoffRule,
) -> CandidateMaskVerdict:
    rows, entries = scores.shape
    if visible.shape != (rows,) or visible.dtype.is_floating_point:
        raise OperandError("judge_candidate_blocks visible", (visible.dtype, tuple(visible.shape)),
                           f"integers [{rows}]")  # fmt: skip
    seen = visible.long().clamp(0, entries)
    masked = scores.where(torch.arange(entries, device=scores.device) < seen.unsqueeze(1), -math.inf)
    bad_scores = ~(masked.isfinite() | (masked == -math.inf))
    masked = masked.where(~bad_scores, -math.inf)
    nominal, score = candidate_blocks(masked, seen, config)
    score = torch.nn.functional.pad(score, (0, kept.shape[1] - score.shape[1]), value=-math.inf)
    nominal = torch.nn.functional.pad(nominal, (0, kept.shape[1] - nominal.shape[1]))

    keep, reachable, pinned = config.candidate_topk_blocks, score > -math.inf, score == math.inf
    found = cutoff_faults(kept, reachable, score, keep, cutoff)
    faults = [
        Fault(bad_scores.any(1, keepdim=True), "reference scores that are not finite in rows"),
        Fault(partial, "blocks kept in part"),
        Fault(kept & ~reachable, "blocks without a visible entry"),
        Fault(pinned & ~kept, "newest blocks left out"),
        Fault(kept & (kept.sum(1, keepdim=True) > keep), "blocks in rows that keep too many"),
        Fault(reachable & ~kept & (found.missing > 0).unsqueeze(1), "blocks left out though there is room"),
    ]
    # Where a block is wrong in itself, the one whose place it takes would make others look bad.
    sound = ~faulty(faults, kept).any(1, keepdim=True)
    faults += [
        Fault(found.below & sound, "blocks worse than one left out"),
        Fault(found.wrong_tie & sound, "ties that do not take the lower block"),
    ]
    bad = faulty(faults, kept)
    return CandidateMaskVerdict(
        rule=rule,
        reasons=reasons_of(faults),
        rows=rows,
        kept=int(kept.sum()),
        bad_rows=int(bad.any(1).sum()),
        off_nominal_rows=int(nominal.ne(kept).any(1).sum()),
        first_index=first_index(bad),
    )


def _rule(config: ModelConfig, cutoff: CutoffRule) -> str:
    return _RULE.format(keep=config.candidate_topk_blocks, size=config.candidate_block_size, cutoff=cutoff)
