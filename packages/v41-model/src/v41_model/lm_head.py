"""The exit boundary: this rank's residual rows to the group's logits in packed token order (model.md section 15).

Collapse and final norm stay local. The normed rows are gathered once, so that every rank applies its part of the
vocabulary to the same rows, and the parts are joined into whole logits on every rank of the group.
"""

from __future__ import annotations

from torch import Tensor

from v41_config import GatheredRows, LocalRows, ModelConfig
from v41_model.collective_log import Site
from v41_model.communicator import Communicator
from v41_model.operators import Operators

__all__ = ["final_norm", "lm_head"]


def final_norm(
    x_hc: LocalRows[Tensor], pre_mix: LocalRows[Tensor], weight: Tensor, config: ModelConfig, operators: Operators
) -> tuple[LocalRows[Tensor], LocalRows[Tensor]]:
    """Collapse with the last layer's pre-mix, then norm: ``(collapsed, normed)``, both BF16 ``[T_local, D]``."""
    collapsed = x_hc.map_tokens(operators.mhc_pre, pre_mix)
    return collapsed, collapsed.map_tokens(lambda rows: operators.rms_norm(rows, weight, config.rms_norm_eps))


def lm_head(
    normed: LocalRows[Tensor], head: Tensor, logit_rows: Tensor | None, communicator: Communicator, operators: Operators
) -> Tensor:
    """Normed rows BF16 ``[T_local, D]`` -> logits FP32 ``[R, V]``, equal on all ranks of the TP group.

    ``head`` is BF16 ``[V / tp, D]``; ``logit_rows`` INT ``[R]`` are packed rows of the step, None for all T of them.
    """
    gathered = GatheredRows(normed.mapping, communicator.all_gather_tokens(normed.tensor, Site("final hidden")))
    rows = gathered.tokens if logit_rows is None else gathered.tokens[logit_rows.long()]
    return communicator.gather_logits(operators.fp32_linear(rows, head), Site("logits"))
