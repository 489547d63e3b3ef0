"""Compressed KV latents: one per token (ratio 1) or one per pair of tokens (ratio 2) (model.md section 9)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from v41_config import STATE_CAPACITY, ForwardMetadata, ModelConfig
from v41_goldens.errors import OperandError, WeightError
from v41_goldens.exact import exp, total
from v41_goldens.linear import bf16_linear, fp32_linear
from v41_goldens.rms_norm import rms_norm
from v41_goldens.weights import CompressorWeights


@dataclass(frozen=True)
class CompressorRows:
    """Which packed rows close a group, and the state ring of each request.

    `closing` INT `[outputs]` rows that close a group; `request` `[T]`; `position` `[T]`, negative where a row is not
    to be stored; `starts` `[B+1]` packed starts; `state_block` `[B]` physical state block, -1 where the compressor is
    disabled. `committed` `[B]`, where the caller knows it, are the tokens whose state the ring holds.
    """

    closing: Tensor
    request: Tensor
    position: Tensor
    starts: Tensor
    state_block: Tensor
    committed: Tensor | None = None

    @staticmethod
    def of(metadata: ForwardMetadata[Tensor], source: int) -> CompressorRows:
        """The rows of KV source `source` (ratio 2)."""
        return CompressorRows(
            closing=metadata.compressor_source_token_indices[source].long(),
            request=metadata.token_to_req_indices.long(),
            position=metadata.position_ids.long(),
            starts=metadata.query_start_loc.long(),
            state_block=metadata.state_block_tables[source][:, 0].long(),
            committed=metadata.kv_seq_lens.long(),
        )


def compress_ratio_1(x: Tensor, weights: CompressorWeights, config: ModelConfig) -> Tensor:
    """Every token's latent: x BF16 `[T, D]` -> BF16 `[T, head_dim]`, un-rotated."""
    return rms_norm(bf16_linear(x, weights.wkv), weights.norm, config.rms_norm_eps)


def compress_ratio_2(
    x: Tensor,
    weights: CompressorWeights,
    rows: CompressorRows,
    state: Tensor,
    config: ModelConfig,
    linear: Callable[[Tensor, Tensor], Tensor] = fp32_linear,
) -> Tensor:
    """Latents of the pairs that close in this step, and the state of the pairs left open.

    x BF16 `[T, D]`; `state` FP32 `[blocks, 4, 2 * head_dim]` (KV projection, then gate score) is read first and
    then written: the last `min(rows of the request, 4)` tokens of each request land in ring slot `position % 4`.
    A pair whose even token came in an earlier step finds it in the ring. `linear` makes both projections. Returns BF16
    `[outputs, head_dim]`.

    Raises:
        OperandError: rows, requests or state blocks that do not exist, a pair that closes at an even position or
            without a state block, a request that does not go on where its committed tokens end. Nothing is written
            then.
    """
    if weights.wgate is None:
        raise WeightError("compressor.wgate.weight", None, "a gate for a compressor of ratio 2")
    _check_rows(rows, len(x), len(state))
    projected = torch.cat([linear(x, weights.wkv), linear(x, weights.wgate)], dim=-1)
    odd = rows.closing
    request, position = rows.request[odd], rows.position[odd]
    starts_here = odd == rows.starts[request]
    remembered = state[rows.state_block[request], (position - 1) % STATE_CAPACITY]
    even = torch.where(starts_here.unsqueeze(-1), remembered, projected[(odd - 1).clamp(min=0)])
    latent = pool_pairs(torch.stack([even, projected[odd]], dim=1), weights.norm, config)

    remaining = rows.starts[rows.request + 1] - torch.arange(len(x), device=x.device)
    keep = (remaining <= STATE_CAPACITY) & (rows.state_block[rows.request] >= 0) & (rows.position >= 0)
    state[rows.state_block[rows.request[keep]], rows.position[keep] % STATE_CAPACITY] = projected[keep]
    return latent


def _check_rows(rows: CompressorRows, tokens: int, blocks: int) -> None:
    """Indices are looked at before anything is read with them: Torch would take -1 for the last block."""
    requests = len(rows.state_block)

    def require(right: Tensor, found: Tensor, operand: str, expected: str) -> None:
        if not bool(right.all()):
            row = int((~right).int().argmax())
            raise OperandError(f"compress_ratio_2 {operand}[{row}]", int(found[row]), expected)

    require((rows.closing >= 0) & (rows.closing < tokens), rows.closing, "closing", f"a row from 0 to {tokens - 1}")
    require((rows.request >= 0) & (rows.request < requests), rows.request, "request", f"one of {requests} requests")
    require(rows.state_block < blocks, rows.state_block, "state_block", f"-1, or one of the {blocks} state blocks")
    closes = rows.position[rows.closing]
    require((closes >= 0) & (closes % 2 == 1), closes, "position of closing", "an odd position, at which a pair closes")
    block = rows.state_block[rows.request[rows.closing]]
    require(block >= 0, block, "state_block of closing", "a state block for a request that publishes pairs")
    if rows.committed is not None:
        first = rows.starts[:-1].clamp(max=max(tokens - 1, 0))
        begins = rows.position[first] if tokens else rows.committed
        silent = (rows.starts[1:] == rows.starts[:-1]) | (rows.state_block < 0)
        require(silent | (begins == rows.committed), begins, "position of request",
                "the position behind the tokens whose state the ring holds")  # fmt: skip


def pool_pairs(pairs: Tensor, norm: Tensor, config: ModelConfig) -> Tensor:
    """Softmax pooling per channel: FP32 `[n, 2, 2 * head_dim]` (KV, then gate) -> BF16 `[n, head_dim]`, normed.

    The pooled value is rounded to BF16 before the norm.
    """
    kv, gate = pairs.chunk(2, dim=-1)
    e = exp(gate - gate.amax(dim=1, keepdim=True))
    weight = e / total(e, dim=1, keepdim=True)
    pooled = total(weight * kv, dim=1).bfloat16()
    return rms_norm(pooled, norm, config.rms_norm_eps)
