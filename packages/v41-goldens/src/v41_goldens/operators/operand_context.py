"""A forward context made of a call's operands: what attention over paged caches needs, and no more."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from v41_config import BLOCK_ROWS, ForwardMetadata, LayerConfig
from v41_goldens.errors import OperandError
from v41_goldens.forward_context import DEFAULT_MAX_LOGITS_BYTES, ForwardContext
from v41_goldens.operators.call import Call
from v41_goldens.paged_cache import PagedCaches, RowCache
from v41_goldens.quantisers import dequantize_compressed_kv, dequantize_index, dequantize_window_kv
from v41_goldens.rope_rows import RopeRows

_DECODERS = {
    "window_kv": dequantize_window_kv,
    "compressed_kv": dequantize_compressed_kv,
    "index_key": dequantize_index,
}


@dataclass
class OperandContext(ForwardContext):
    """RoPE rows are operands here, gathered by the caller."""

    query_rows: tuple[Tensor, Tensor] | None = None
    group_rows: tuple[Tensor, Tensor] | None = None

    def query_rope(self, layer: LayerConfig) -> tuple[Tensor, Tensor]:
        """The operands `rope_cos`, `rope_sin`."""
        assert self.query_rows is not None
        return self.query_rows

    def compressed_rope(self, layer: LayerConfig) -> tuple[Tensor, Tensor]:
        """The operands `compressed_rope_cos`, `compressed_rope_sin`."""
        assert self.group_rows is not None
        return self.group_rows


def row_cache(call: Call, name: str) -> RowCache:
    """A paged cache among the operands: the caller's storage."""
    return RowCache(call[name], call[f"{name}_scale"], _DECODERS[name])


def operand_context(call: Call, layer: LayerConfig) -> OperandContext:
    """Metadata, caches, RoPE rows and selections of one layer's call.

    Raises:
        OperandError: requests, starts or block ids that do not describe the packed rows.
    """
    tensors, source = call.tensors, layer.kv_source
    caches = PagedCaches()
    if "window_kv" in tensors:
        caches.window[layer.layer_id] = row_cache(call, "window_kv")
    if source is not None:
        for name, pool in (("compressed_kv", caches.compressed), ("index_key", caches.index_key)):
            if name in tensors:
                pool[source] = row_cache(call, name)
        if "state_cache" in tensors:
            caches.state[source] = call["state_cache"]
    context = OperandContext(
        config=call.config,
        metadata=_metadata(call, source),
        caches=caches,
        rope=RopeRows({}),
        max_logits_bytes=int(call.scalars.get("max_logits_bytes", DEFAULT_MAX_LOGITS_BYTES)),
        query_rows=call.rope() if "rope_cos" in tensors else None,
        group_rows=call.rope("compressed_") if "compressed_rope_cos" in tensors else None,
    )
    if "topk_rows" in tensors and layer.index_source is not None:
        context.topk[layer.index_source] = call["topk_rows"]
    if "CANDIDATE_BLOCKS" in call.bound.dims:
        _check_candidate_blocks(call)
        context.candidate_blocks = tensors.get("kept_blocks")
    return context


def _metadata(call: Call, source: int | None) -> ForwardMetadata[Tensor]:
    tensors, nothing = call.tensors, torch.empty(0, dtype=torch.int32)
    fields: dict[str, object] = {
        field.name: {} if str(field.type).startswith("Mapping") else nothing
        for field in dataclasses.fields(ForwardMetadata)
    }
    for name in ("window_slots", "window_indices", "position_ids"):
        fields[name] = tensors.get(name, nothing)
    if "position_ids" not in tensors and call.active is not None:
        fields["position_ids"] = torch.empty(call.active, dtype=torch.int32)  # only their number counts
    if "token_to_req_indices" in tensors:
        fields |= _requests(call)
    if source is not None:
        table = tensors.get("compressed_block_table")
        if table is not None:
            _check_blocks(call, table)
        by_source = {
            "compressed_slots": tensors.get("compressed_slots"),
            "index_slots": tensors.get("index_slots"),
            "compressed_block_tables": table,
            "compressed_lens": tensors.get("compressed_lens"),
            "state_block_tables": tensors.get("state_block_table"),
        }
        fields |= {name: {source: value} for name, value in by_source.items() if value is not None}
        if "compressed_slots" in tensors:
            closes = (call["compressed_slots"] >= 0) | (call["index_slots"] >= 0)
            fields["compressor_source_token_indices"] = {source: closes.nonzero().flatten().int()}
    return ForwardMetadata(**fields)  # type: ignore[arg-type]


def _requests(call: Call) -> dict[str, Tensor]:
    """Packed starts and lengths of the requests, from what the operator is told of them."""
    request = call["token_to_req_indices"]
    table = call.tensors.get("state_block_table", call.tensors.get("compressed_block_table"))
    requests = int(request.max()) + 1 if table is None and len(request) else 0 if table is None else len(table)
    where = f"{call.bound.spec.name} token_to_req_indices"
    outside = (request < 0) | (request >= requests)
    if outside.any():
        row = int(outside.int().argmax())
        raise OperandError(f"{where}[{row}]", int(request[row]), f"one of {requests} requests")
    lens = torch.bincount(request, minlength=requests).int()
    starts = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()
    packed = torch.repeat_interleave(torch.arange(requests, device=lens.device), lens)
    if not torch.equal(packed, request.long()):
        raise OperandError(where, request.tolist(), "packed rows: those of request 0, then of request 1, and so on")
    given = call.tensors.get("query_start_loc")
    if given is not None and not torch.equal(given, starts):
        raise OperandError(f"{call.bound.spec.name} query_start_loc", given.tolist(), str(starts.tolist()))
    fields = {"query_start_loc": starts, "query_lens": lens, "token_to_req_indices": request}
    if "position_ids" in call.tensors:  # a caller's first position is all that an operator is told of what came before
        fields["kv_seq_lens"] = call["position_ids"][starts[:-1].long().clamp(max=max(len(request) - 1, 0))]
    return fields


def _check_blocks(call: Call, table: Tensor) -> None:
    """A table is used for the index keys and for the compressed KV, which have equally many blocks."""
    blocks = call.bound.dims["COMPRESSED_BLOCKS"]
    if table.numel() and int(table.max()) >= blocks:
        raise OperandError(f"{call.bound.spec.name} compressed_block_table", int(table.max()), f"-1, or below {blocks}")
    if "compressed_lens" in call.tensors and "token_to_req_indices" in call.tensors:
        check_visible(call, table.shape[1] * int(BLOCK_ROWS), f"the entries of {table.shape[1]} pages")


def _check_candidate_blocks(call: Call) -> None:
    room = call.bound.dims["CANDIDATE_BLOCKS"] * call.config.candidate_block_size
    check_visible(call, room, "the entries of the candidate blocks")


def check_visible(call: Call, room: int, what: str) -> None:
    """Every token sees some of the entries that there is room for. Errors: `OperandError`, naming the token."""
    visible = call["compressed_lens"].long()
    outside = (visible < 0) | (visible > room)
    if outside.any():
        row = int(outside.int().argmax())
        raise OperandError(f"{call.bound.spec.name} compressed_lens[{row}]", int(visible[row]), f"0 to {room}, {what}")


def kept_blocks(call: Call, context: ForwardContext) -> Tensor:
    """The candidate blocks that a context holds, as wide as the destination: bool `[T, CANDIDATE_BLOCKS]`."""
    width = call.bound.dims["CANDIDATE_BLOCKS"]
    if context.candidate_blocks is None:
        return torch.zeros(call.active or 0, width, dtype=torch.bool, device=call["compressed_lens"].device)
    return torch.nn.functional.pad(context.candidate_blocks, (0, width - context.candidate_blocks.shape[1]))
