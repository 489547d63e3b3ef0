"""Storage outside the rows that a step owns: byte for byte as before (model.md section 16).

Where an operator may write is lowered anew here from positions and block tables, not taken from what it did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from v41_config import STATE_CAPACITY, ForwardMetadata, LayerConfig
from v41_goldens.judges.verdict import Verdict, first_index, unlike
from v41_goldens.paged_cache import PagedCaches


@dataclass(frozen=True, kw_only=True, repr=False)
class StorageVerdict(Verdict):
    """Statistics of storage that had to stay as it was.

    Attributes:
        tensors: cache tensors compared.
        rows: physical rows compared that nobody owned.
        bad_rows, changed_bytes: those that changed nevertheless.
        first_place: tensor, physical row and byte of the first change.
    """

    tensors: int = 0
    rows: int = 0
    bad_rows: int = 0
    changed_bytes: int = 0
    first_place: tuple[str, int, int] | None = None

    @property
    def statistics(self) -> str:
        return (
            f"{self.changed_bytes} bytes in {self.bad_rows} of {self.rows} rows of {self.tensors} tensors that nobody "
            "owned changed"
        )


def cache_tensors(caches: PagedCaches) -> dict[str, Tensor]:
    """Every cache tensor by name, such as `window.3.payload`, `index_key.2.scale` or `state.2`; not copied."""
    tensors = {f"state.{layer}": state for layer, state in caches.state.items()}
    for pool in ("window", "compressed", "index_key"):
        for layer, cache in getattr(caches, pool).items():
            tensors[f"{pool}.{layer}.payload"] = cache.payload
            tensors[f"{pool}.{layer}.scale"] = cache.scale
    return tensors


def storage_snapshot(caches: PagedCaches) -> dict[str, Tensor]:
    """Copies of `cache_tensors`, to judge a later call by."""
    return {name: tensor.clone() for name, tensor in cache_tensors(caches).items()}


def owned_rows(metadata: ForwardMetadata[Tensor], layer: LayerConfig) -> dict[str, Tensor]:
    """The physical rows, INT64, that a layer's attention may write in a step, by the names of `cache_tensors`.

    Its own window rows, and of a KV source the rows of the groups that close, and the ring slots of the last tokens
    of each request. -1 is nothing.
    """
    source, owned = layer.layer_id, {"window": metadata.window_slots}
    if layer.owns_kv:
        owned |= {"compressed": metadata.compressed_slots[source], "index_key": metadata.index_slots[source]}
    rows = {f"{pool}.{source}.{part}": slots for pool, slots in owned.items() for part in ("payload", "scale")}
    if layer.owns_kv and layer.compress_ratio == 2:
        rows[f"state.{source}"] = _ring_rows(metadata, source)
    return rows


def judge_storage(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], owned: Mapping[str, Tensor]
) -> StorageVerdict:
    """Every byte outside the owned rows, payload, scale and state alike, is what it was.

    What stands in the owned rows is another question: compare it with `judge_equal_bits`.

    Args:
        before: `storage_snapshot` from before the call.
        after: `cache_tensors` after it: `[blocks, rows of a block, ...]` each.
        owned: physical rows (`block * rows of a block + offset`) that the call may write; negative ones are nothing,
            a tensor that is not named is not to be written at all.
    """
    rule = "every byte outside the owned rows as before"
    reasons, rows, bad_rows, changed_bytes, first = list[str](), 0, 0, 0, None
    for name in sorted(before.keys() ^ after.keys() | owned.keys() - before.keys()):
        reasons.append(f"{name}: expected before and after the call")
    for name in sorted(before.keys() & after.keys()):
        old, new = before[name], after[name]
        different = unlike(new, old)
        if different:
            reasons += [f"{name}: {reason}" for reason in different]
            continue
        changed = _row_bytes(new) != _row_bytes(old)
        mine = owned.get(name, torch.empty(0)).long()
        outside = torch.ones(len(changed), dtype=torch.bool, device=changed.device)
        outside[mine[mine >= 0]] = False
        changed &= outside.unsqueeze(1)
        rows, place = rows + int(outside.sum()), first_index(changed)
        if place is not None:
            bad, count = int(changed.any(1).sum()), int(changed.sum())
            bad_rows, changed_bytes = bad_rows + bad, changed_bytes + count
            reasons.append(f"{name}: {count} bytes changed in {bad} rows, first at row {place[0]} byte {place[1]}")
            first = first or (name, place[0], place[1])
    return StorageVerdict(
        rule=rule,
        reasons=tuple(reasons),
        tensors=len(before),
        rows=rows,
        bad_rows=bad_rows,
        changed_bytes=changed_bytes,
        first_place=first,
    )


def assert_storage(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], owned: Mapping[str, Tensor], name: str
) -> None:
    """Raise `JudgementError` unless `judge_storage` accepts what the call named `name` did."""
    judge_storage(before, after, owned).require(name)


def _row_bytes(tensor: Tensor) -> Tensor:
    """uint8 `[physical rows, bytes]`."""
    return tensor.contiguous().view(torch.uint8).flatten(0, 1).flatten(1)


def _ring_rows(metadata: ForwardMetadata[Tensor], source: int) -> Tensor:
    """Physical ring rows of the last min(rows, 4) tokens of each request that has a state block."""
    back = torch.arange(STATE_CAPACITY, device=metadata.query_lens.device)
    position = metadata.new_kv_seq_lens.long().unsqueeze(1) - 1 - back
    block = metadata.state_block_tables[source].long()
    written = (back < metadata.query_lens.unsqueeze(1)) & (block >= 0)
    return (block * STATE_CAPACITY + position % STATE_CAPACITY).where(written, -1).flatten()
