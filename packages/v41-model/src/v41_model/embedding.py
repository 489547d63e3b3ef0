"""The entry boundary: token ids to this rank's own rows of the residual (model.md section 4).

Which way is taken follows from the weights a rank holds. A whole table is looked up for the rank's own slab, without
communication. A vocabulary shard gives every row of the group a partial, and a ReduceScatter along the tokens leaves
each rank the complete embeddings of its slab: the same collective that ends attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from v41_config import PADDING_ID, GatheredRows, LocalRows, ModelConfig, V41Error
from v41_model.collective_log import Site
from v41_model.communicator import Communicator

__all__ = ["embed_tokens"]


def embed_tokens(
    token_ids: GatheredRows[Tensor], table: Tensor, config: ModelConfig, communicator: Communicator
) -> LocalRows[Tensor]:
    """Token ids INT32 ``[tp * T_local]`` (padding -1) -> this rank's embeddings BF16 ``[T_local, D]``, padding zero.

    ``table`` is BF16 ``[V, D]``, or the ``[V / tp, D]`` rows of the rank's vocabulary range. A group without tokens
    communicates nothing.

    The ids are in the vocabulary (:meth:`StepBatch.lower` checks them). Errors: :class:`v41_config.V41Error` for a
    table that is neither.
    """
    mapping, rank = token_ids.mapping, communicator.rank
    if mapping.active == 0:
        return mapping.pad(table[:0], rank)
    held = communicator.layout.vocab_range(config, rank)
    if table.shape[0] == config.vocab_size:
        return mapping.pad(table[mapping.shard(token_ids.tokens, rank, fill=PADDING_ID).tokens.long()], rank)
    if table.shape[0] == len(held):
        return _reduce_partials(token_ids, table, held, communicator)
    raise V41Error(
        "embedding table", f"{table.shape[0]} rows", f"{config.vocab_size} rows, or {len(held)} of this rank"
    )


def _reduce_partials(
    token_ids: GatheredRows[Tensor], table: Tensor, held: range, communicator: Communicator
) -> LocalRows[Tensor]:
    mapping = token_ids.mapping
    ids = token_ids.tensor.long()
    mine = (ids >= held.start) & (ids < held.stop)
    rows = table[torch.where(mine, ids - held.start, 0)].float()
    # -0 is the zero that changes nothing: a row of -0 plus +0 would lose the sign that the table stores
    partial = rows.masked_fill_(~mine.unsqueeze(-1), -0.0)
    summed = communicator.reduce_scatter_tokens(partial, Site("embedding"))
    active = mapping.active_rows(communicator.rank)
    return mapping.pad(summed[:active].bfloat16(), communicator.rank)
