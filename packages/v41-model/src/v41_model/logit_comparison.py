"""Logits of a run with exchanged operators beside the goldens' on the same tokens.

Two arithmetics drift apart from the first code that they round differently, so whole runs are compared coarsely: only
one that lost its way shows here. What an operator does wrong is judged call by call (:mod:`v41_model.swap_report`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from v41_goldens.errors import OperandError
from v41_goldens.judges.row_errors import row_errors
from v41_goldens.judges.verdict import Fault, Verdict, reasons_of, unlike
from v41_model.forward_file import forward_tensors
from v41_model.session import ModelSession

__all__ = ["LOGIT_BOUNDS", "LogitBounds", "LogitVerdict", "compare_with_goldens", "judge_logits"]


@dataclass(frozen=True)
class LogitBounds:
    """The smallest cosine that any position may have with the golden's logits, and the smallest median of them.

    A cosine does not see a factor; so no position's relative L2 distance may exceed that of two vectors of one length
    with the smallest cosine.
    """

    minimum: float = 0.98
    median: float = 0.999

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0.0 <= value <= 1.0:
                raise OperandError(f"LogitBounds.{name}", value, "a number from 0 to 1")

    @property
    def relative_l2(self) -> float:
        """0.2 for a cosine of 0.98."""
        return math.sqrt(2.0 - 2.0 * self.minimum)

    def __str__(self) -> str:
        return (
            f"cosine >= {self.minimum:g} and relative L2 <= {self.relative_l2:.3g} at every position, median cosine "
            f">= {self.median:g}, all finite"
        )


LOGIT_BOUNDS = LogitBounds()
"""What another order of the sums in TINY's products does to its logits stays within them (model.md section 3)."""


@dataclass(frozen=True, kw_only=True, repr=False)
class LogitVerdict(Verdict):
    """Cosines FP64 ``[N]`` of every position, and at how many the best token is the golden's.

    Both are empty where dtype or shape already differ.
    """

    cosines: Tensor
    same_tokens: int = 0

    @property
    def statistics(self) -> str:
        if not len(self.cosines):
            return "no positions"
        return (
            f"{len(self.cosines)} positions: cosine {float(self.cosines.min()):.6f} minimum, "
            f"{float(self.cosines.median()):.6f} median; the best token is the golden's at {self.same_tokens}"
        )


def judge_logits(actual: Tensor, expected: Tensor, bounds: LogitBounds = LOGIT_BOUNDS) -> LogitVerdict:
    """FP32 logits ``[N, V]`` of N >= 1 positions whose tokens so far are the same.

    The median of an even number of cosines is the lower of the middle two.

    Raises:
        OperandError: expected logits of no position, without a vocabulary, or not of floating point.
    """
    if not len(expected):
        raise OperandError("judge_logits expected", tuple(expected.shape), "logits of one position at least")
    if reasons := unlike(actual, expected):
        return LogitVerdict(rule=str(bounds), reasons=reasons, cosines=torch.empty(0, dtype=torch.float64))
    errors = row_errors(actual, expected, None)
    length = errors.expected_rms * errors.found_rms
    cosines = torch.where(length > 0, errors.product / length, (errors.rms == 0).double())
    finite = errors.non_finite == 0
    cosines = cosines.where(finite, -1.0)
    faults = (
        Fault(~finite, "positions with logits that are not finite"),
        Fault(finite & (cosines < bounds.minimum), f"positions with a cosine below {bounds.minimum:g}"),
        Fault(
            finite & (errors.rms > bounds.relative_l2 * errors.expected_rms),
            f"positions with a relative L2 distance beyond {bounds.relative_l2:.3g}",
        ),
    )
    reasons = reasons_of(faults)
    if float(cosines.median()) < bounds.median:
        reasons = (*reasons, f"a median cosine of {float(cosines.median()):.6f}")
    same = int((actual.argmax(-1) == expected.argmax(-1)).sum())
    return LogitVerdict(rule=str(bounds), reasons=reasons, cosines=cosines, same_tokens=same)


def compare_with_goldens(session: ModelSession, tensors: Mapping[str, Tensor], requests: int) -> LogitVerdict:
    """The verdict over all positions of what :func:`forward_tensors` gave for some requests.

    ``session`` holds the goldens by now. It takes the same tokens in one prefill, for which its limits grow, those that
    the run itself chose included: so a token chosen differently does not make every later position another one.

    Errors: those of :func:`forward_tensors`.
    """
    fed = []
    ours = []
    for request in range(requests):
        kinds = [kind for kind in ("", "decode_") if f"request.{request}.{kind}tokens" in tensors]
        fed.append(torch.cat([tensors[f"request.{request}.{kind}tokens"] for kind in kinds]).tolist())
        ours.append(torch.cat([tensors[f"request.{request}.{kind}logits"] for kind in kinds]))
    rows = max(session.limits.prefill_rows, sum(map(len, fed)))
    session.limits = replace(session.limits, prefill_rows=rows)
    golden = forward_tensors(session, fed)
    return judge_logits(torch.cat(ours), torch.cat([golden[f"request.{i}.logits"] for i in range(requests)]))
