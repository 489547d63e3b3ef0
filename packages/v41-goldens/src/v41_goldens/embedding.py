"""A rank's part of the embedding (model.md section 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from v41_goldens.errors import OperandError


def embedded_partial(token_ids: Tensor, table: Tensor, vocab_start: int, vocab_size: int) -> Tensor:
    """Rows of a vocabulary range: ids INT `[T]`, table BF16 `[V_local, D]` from id `vocab_start` on -> FP32 `[T, D]`.

    The ids of other ranks give -0, which changes no stored bit when partials are added: +0 would lose the sign of a
    stored -0.

    Raises:
        OperandError: an id outside the vocabulary.
    """
    outside = (token_ids < 0) | (token_ids >= vocab_size)
    if outside.any():
        row = int(outside.int().argmax())
        raise OperandError(f"embed token_ids[{row}]", int(token_ids[row]), f"an id from 0 to {vocab_size - 1}")
    local = token_ids.long() - vocab_start
    mine = (local >= 0) & (local < len(table))
    if not len(table):
        return torch.full((len(token_ids), table.shape[1]), -0.0, dtype=torch.float32, device=table.device)
    rows = table[torch.where(mine, local, 0)].to(torch.float32)
    return rows.masked_fill_(~mine.unsqueeze(-1), -0.0)
