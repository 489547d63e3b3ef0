"""The exit boundary: this rank's residual rows to the group's logits in packed token order (model.md section 15).

Collapse and final norm stay local. The normed rows are gathered once, so that every rank applies its part of the
vocabulary to the same rows, and the parts are joined into whole logits on every rank of the group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from v41_config import LocalRows, ModelConfig
from v41_model.collective_log import Site
from v41_model.communicator import Communicator
from v41_model.operator_checks import checked
from v41_model.operators import Operators
from v41_model.wiring import TpBoundary

__all__ = ["final_norm", "lm_head"]


def final_norm(
    x_hc: LocalRows[Tensor], pre_mix: LocalRows[Tensor], weight: Tensor, config: ModelConfig, operators: Operators
) -> tuple[LocalRows[Tensor], LocalRows[Tensor]]:
    """Collapse with the last layer's pre-mix, then norm: ``(collapsed, normed)``, both BF16 ``[T_local, D]``."""

    def collapse(rows: Tensor, mix: Tensor) -> Tensor:
        return checked("hc_head", operators.hc_head(rows, mix), (rows.shape[0], rows.shape[2]))

    def norm(rows: Tensor) -> Tensor:
        return checked("rms_norm", operators.rms_norm(rows, weight, config.rms_norm_eps), rows.shape)

    collapsed = x_hc.map_tokens(collapse, pre_mix)
    return collapsed, collapsed.map_tokens(norm)


def lm_head(
    normed: LocalRows[Tensor],
    head: Tensor,
    logit_rows: Tensor | None,
    boundary: TpBoundary,
    communicator: Communicator,
    operators: Operators,
) -> Tensor:
    """Normed rows BF16 ``[T_local, D]`` -> logits FP32 ``[R, V]``, equal on all ranks of the TP group.

    ``head`` is BF16 ``[V / tp, D]``; ``logit_rows`` INT ``[R]`` are packed rows of the step, None for all T of them.
    """
    tokens = boundary.gather(normed, Site("final hidden")).tokens
    rows = tokens if logit_rows is None else tokens[logit_rows.long()]
    logits = checked("fp32_linear", operators.fp32_linear(rows, head), (len(rows), len(head)), torch.float32)
    return communicator.gather_logits(logits, Site("logits"))
