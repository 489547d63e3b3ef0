"""Captured tensors of the ranks of a DP group, put together and cut into requests (model.md section 18).

Ranks record under the golden's keys, each what it has: its token rows, its heads, or what every rank of the group
computes alike. Merged, a group's records look as if one process had made them in packed token order; cut by request,
they have the keys, shapes and dtypes of a conformance file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

import torch
from torch import Tensor

from v41_config import ForwardMetadata, LayerConfig, ModelConfig, SlabError
from v41_goldens.capture import Capture, layer_key

__all__ = ["COMPRESSOR_STATE", "Held", "held_by_ranks", "merge_captures", "request_tensors", "selection_gap"]


COMPRESSOR_STATE = "compressor_state"
"""Key under which ranks record the state rings of a step's requests, FP32 ``[B, STATE_CAPACITY, 2 * head_dim]``."""


class Held(Enum):
    """What a rank's record of a tensor is, seen from the group."""

    TOKENS = "its token rows"
    HEADS = "its heads, dimension 1"
    ALL = "the whole tensor, equal on every rank"


_HEADS = frozenset({"q", "sparse_attn_out"})
_ALL = frozenset(
    {"attn_in", "qr", "window_kv", "compressed_latent", "compressed_kv", "index_k", "index_score", "topk"}
    | {"candidate_mask", "candidate_block_score", COMPRESSOR_STATE, "logits"}
)  # fmt: skip
_TOKENS = frozenset(
    {"attn_out", "moe_in", "moe_out", "shared_out", "X", "pre_mix", "router_ids", "router_weights"}
    | {"router_score_plus_bias", "embed_out", "final.collapsed", "final.norm_out"}
    | {f"hc_{sublayer}_{part}" for sublayer in ("attn", "ffn") for part in ("pre", "post", "comb")}
)  # fmt: skip


def held_by_ranks(key: str) -> Held:
    """How a captured key is spread over a TP group. Errors: :class:`SlabError` for a key nobody declared."""
    name = key.split(".", 2)[-1] if key.startswith("layer.") else key
    for held, names in ((Held.TOKENS, _TOKENS), (Held.HEADS, _HEADS), (Held.ALL, _ALL)):
        if name in names:
            return held
    raise SlabError("captured tensor", key, "a key whose place in the TP group is declared")


def merge_captures(captures: Sequence[Capture]) -> dict[str, Tensor]:
    """The records of a TP group's ranks, in rank order, as one set of tensors in packed token order.

    Errors: :class:`SlabError` when ranks recorded different keys, or differ where they should be equal.
    """
    first = captures[0].tensors
    merged = {}
    for key, tensor in first.items():
        if any(key not in c.tensors for c in captures):
            raise SlabError(
                f"captured tensor {key}", "missing on some ranks", "the same keys on all ranks of the group"
            )
        parts = [c.tensors[key] for c in captures]
        held = held_by_ranks(key)
        if held is Held.ALL:
            if not all(torch.equal(tensor, part) for part in parts):
                raise SlabError(f"captured tensor {key}", "different values", "equal values on every rank of the group")
            merged[key] = tensor
        else:
            merged[key] = torch.cat(parts, dim=0 if held is Held.TOKENS else 1)
    return merged


def request_tensors(
    config: ModelConfig, merged: Mapping[str, Tensor], metadata: ForwardMetadata[Tensor], request: int
) -> dict[str, Tensor]:
    """One request's part of a group's merged records of a prefill, under the keys of a conformance file.

    Rows are the request's tokens or, for what a compressor publishes, its entries; scores and masks are cut to the
    request's own entries. Adds the ring of window KV, the open pair of each ratio-2 compressor and the distance of
    each selection from its runner-up.
    """
    tensors = {key: merged[key][_rows(metadata, request)] for key in ("embed_out", "final.collapsed", "final.norm_out")}
    for layer in config.layers:
        prefix = layer_key(layer.layer_id, "")
        own = {key.removeprefix(prefix): t for key, t in merged.items() if key.startswith(prefix)}
        cut = _layer_tensors(config, layer, own, metadata, request)
        tensors.update({prefix + name: tensor.contiguous() for name, tensor in cut.items()})
    return tensors


_ENTRY_ROWS = ("compressed_latent", "compressed_kv", "index_k")


def _layer_tensors(
    config: ModelConfig,
    layer: LayerConfig,
    own: Mapping[str, Tensor],
    metadata: ForwardMetadata[Tensor],
    request: int,
) -> dict[str, Tensor]:
    """A layer's tensors of one request, by their names without the layer."""
    tokens = _rows(metadata, request)
    cut = {name: tensor[tokens] for name, tensor in own.items() if name not in (*_ENTRY_ROWS, COMPRESSOR_STATE)}
    cut["window_ring"] = _window_ring(cut["window_kv"], config.sliding_window)
    cut["router_score_plus_bias_gap"] = selection_gap(cut["router_score_plus_bias"], config.num_experts_per_tok)
    if layer.kv_source is None:
        return cut
    length = int(metadata.new_kv_seq_lens[request])
    entries = length // layer.compress_ratio
    if layer.owns_kv:
        outputs = metadata.compressor_output_start_loc[layer.layer_id]
        published = slice(int(outputs[request]), int(outputs[request + 1]))
        cut.update({name: own[name][published] for name in _ENTRY_ROWS})
    if COMPRESSOR_STATE in own:
        kv, score = _open_group(own[COMPRESSOR_STATE][request], length, layer.compress_ratio)
        cut.update(compressor_kv_state=kv, compressor_score_state=score)
    if layer.owns_index:
        cut["topk"] = cut["topk"][:, : min(config.index_topk, entries)]
        cut["index_score"] = cut["index_score"][:, :entries]
        if entries:
            cut["index_score_gap"] = selection_gap(cut["index_score"], config.index_topk)
    if layer.makes_candidates:
        blocks = -(-entries // config.candidate_block_size)
        cut["candidate_mask"] = cut["candidate_mask"][:, :entries].to(torch.uint8)
        cut["candidate_block_score"] = cut["candidate_block_score"][:, :blocks]
        if entries:
            cut["candidate_block_score_gap"] = selection_gap(cut["candidate_block_score"], config.candidate_topk_blocks)
    return cut


def selection_gap(scores: Tensor, k: int) -> Tensor:
    """Last kept minus first dropped score of each row's top ``k``: ``[T, n]`` -> FP32 ``[T]``.

    0 is a tie; infinite where nothing with a score above -inf is dropped.
    """
    if scores.shape[1] <= k:
        return torch.full((scores.shape[0],), torch.inf)
    best = scores.float().sort(dim=1, descending=True).values
    kept, dropped = best[:, k - 1], best[:, k]
    return torch.where(dropped > -torch.inf, kept - dropped, torch.inf)


def _window_ring(window_kv: Tensor, window: int) -> Tensor:
    """The last ``window`` rows of a prefill at slot ``position % window``; unwritten slots are zero."""
    length = window_kv.shape[0]
    positions = torch.arange(max(0, length - window), length)
    ring = window_kv.new_zeros((window, window_kv.shape[1]))
    ring[positions % window] = window_kv[positions]
    return ring


def _open_group(ring: Tensor, length: int, ratio: int) -> tuple[Tensor, Tensor]:
    """KV and score ``[ratio, head_dim]`` of the tokens that wait for their group's last one.

    ``ring`` is FP32 ``[STATE_CAPACITY, 2 * head_dim]``; slots past the open tail are 0 and -inf, as never written.
    """
    width = ring.shape[1] // 2
    kv, score = ring.new_zeros((ratio, width)), ring.new_full((ratio, width), -torch.inf)
    waiting = torch.arange(length - length % ratio, length)
    kv[waiting % ratio], score[waiting % ratio] = ring[waiting % ring.shape[0]].split(width, dim=1)
    return kv, score


def _rows(metadata: ForwardMetadata[Tensor], request: int) -> slice:
    return slice(int(metadata.query_start_loc[request]), int(metadata.query_start_loc[request + 1]))
