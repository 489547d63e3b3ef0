"""The entry boundary: token ids to this rank's own rows of the residual (model.md section 4).

Which way is taken follows from the weights a rank holds. A whole table is looked up for the rank's own slab, without
communication. A vocabulary shard gives every row of the group a partial, and a ReduceScatter along the tokens leaves
each rank the complete embeddings of its slab: the same collective that ends attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from v41_config import PADDING_ID, LocalRows, ModelConfig, V41Error
from v41_model.collective_log import Site
from v41_model.operator_checks import checked
from v41_model.operators import Operators
from v41_model.wiring import TpBoundary

__all__ = ["embed_tokens"]


def embed_tokens(
    token_ids: Tensor, table: Tensor, config: ModelConfig, boundary: TpBoundary, operators: Operators
) -> LocalRows[Tensor]:
    """Packed token ids INT32 ``[T]`` of the group -> embeddings BF16 of this rank's residual rows, padding zero.

    ``table`` is BF16 ``[V, D]``, or the ``[V / tp, D]`` rows of the rank's vocabulary range. A group without tokens
    communicates nothing.

    The ids are in the vocabulary (:meth:`StepBatch.lower` checks them). Errors: :class:`v41_config.V41Error` for a
    table that is neither.
    """

    def embed(ids: Tensor, vocab_start: int) -> Tensor:
        partial = operators.embed(ids, table, vocab_start, config.vocab_size)
        return checked("embed", partial, (len(ids), table.shape[1]), torch.float32)

    held = boundary.mapping.layout.vocab_range(config, boundary.rank)
    if table.shape[0] not in (config.vocab_size, len(held)):
        expected = f"{config.vocab_size} rows, or {len(held)} of this rank"
        raise V41Error("embedding table", f"{table.shape[0]} rows", expected)
    if table.shape[0] == config.vocab_size or boundary.mapping.active == 0:
        return boundary.pad(embed(boundary.hold(token_ids, PADDING_ID).tokens, 0).bfloat16())
    summed = boundary.reduce(embed(token_ids, held.start), Site("embedding"))
    return boundary.pad(summed.tokens.bfloat16())
