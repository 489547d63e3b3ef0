"""What sharding a checkpoint will read, write and take, known before a byte of payload is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from v41_config.parallel_layout import ParallelLayout
from v41_loader.bounded_jobs import thread_count
from v41_loader.inventory import GroupTotal, Inventory, StoredTensor
from v41_loader.layouts import get_layout
from v41_loader.partition import checked_ranks
from v41_loader.rules import Partition, TensorGroup
from v41_loader.sharding.part_blocks import BLOCK_BYTES
from v41_loader.sharding.rank_contents import stored_parts
from v41_loader.sharding.rank_file_writer import MEMORY_BUDGET
from v41_loader.sharding.tensor_copy import TensorCopy

_BUFFERS_PER_THREAD = 2
"""Whole rows, and a part's piece of them."""

_BOOKKEEPING_BYTES = 10 << 8
"""Names, places, parts and digests of one tensor, while a run holds those of all."""


@dataclass(frozen=True)
class RankPlan:
    """One rank: `nbytes` of its file without the header, by class too; `read_bytes` of the checkpoint that it needs."""

    rank: int
    tensors: int
    nbytes: int
    read_bytes: int
    groups: Mapping[TensorGroup, int]


@dataclass(frozen=True)
class ShardPlan:
    """A run of `shard_checkpoint`: what it reads (each byte once, whatever number of ranks hold it) and writes.

    `files` are those that hold what is read, of `checkpoint_files`. `memory_bound` counts what the run adds to the
    memory of a process that has imported the package: bookkeeping, buffers, and tensors that a layout must see whole.
    """

    layout: ParallelLayout
    weight_layout: str
    ranks: tuple[RankPlan, ...]
    tensors: int
    read_bytes: int
    written_bytes: int
    files: int
    checkpoint_files: int
    checkpoint_tensors: int
    checkpoint_bytes: int
    memory_bound: int
    skipped: tuple[GroupTotal, ...]
    notice: str | None

    def to_json(self) -> dict[str, object]:
        """The plan as JSON values, in bytes and counts."""
        return {
            "tp": self.layout.tp,
            "dp": self.layout.dp,
            "ep": self.layout.ep,
            "weight_layout": self.weight_layout,
            "tensors": self.tensors,
            "read_bytes": self.read_bytes,
            "written_bytes": self.written_bytes,
            "files": self.files,
            "memory_bound": self.memory_bound,
            "checkpoint": {
                "files": self.checkpoint_files,
                "tensors": self.checkpoint_tensors,
                "bytes": self.checkpoint_bytes,
            },
            "ranks": [
                {
                    "rank": rank.rank,
                    "tensors": rank.tensors,
                    "bytes": rank.nbytes,
                    "read_bytes": rank.read_bytes,
                    "classes": {group.value: nbytes for group, nbytes in rank.groups.items()},
                }
                for rank in self.ranks
            ],
            "skipped": [total.to_json() for total in self.skipped],
            "notice": self.notice,
        }


def plan_shards(
    inventory: Inventory,
    layout: ParallelLayout,
    ranks: Iterable[int] | None = None,
    weight_layout: str = "canonical",
    threads: int | None = None,
) -> ShardPlan:
    """Plan what `shard_checkpoint` does with the same arguments, without torch and without payload.

    Raises:
        LayoutError, ShardingError: as `shard_checkpoint`.
    """
    wanted = checked_ranks(inventory.config, layout, ranks)
    kinds = _kinds(inventory, layout, set(wanted), weight_layout)
    totals = inventory.group_totals()
    largest = max((kind.copy.working_memory for kind in kinds), default=0)
    return ShardPlan(
        layout=layout,
        weight_layout=weight_layout,
        ranks=tuple(_rank_plan(rank, kinds) for rank in wanted),
        tensors=sum(kind.count for kind in kinds),
        read_bytes=sum(kind.count * kind.copy.read_bytes for kind in kinds),
        written_bytes=sum(kind.count * kind.copy.written_bytes for kind in kinds),
        files=len(frozenset().union(*(kind.files for kind in kinds))),
        checkpoint_files=len(inventory.files),
        checkpoint_tensors=len(inventory.tensors),
        checkpoint_bytes=sum(total.nbytes for total in totals),
        memory_bound=_memory_bound(len(inventory.tensors), largest, thread_count(threads)),
        skipped=tuple(total for total in totals if total.skipped),
        notice=inventory.notice,
    )


@dataclass(frozen=True)
class _Kind:
    """Tensors that the ranks of a run hold in the same way; `copy` is that of one of them."""

    count: int
    files: frozenset[str]
    copy: TensorCopy


def _kinds(inventory: Inventory, layout: ParallelLayout, ranks: Set[int], weight_layout: str) -> list[_Kind]:
    """What the ranks hold. 96,085 tensors are a few hundred kinds, and only these are looked at closely."""
    config, byte_layout = inventory.config, get_layout(weight_layout)
    owners = [layout.expert_owner(config, expert) for expert in range(config.n_routed_experts)]
    alike: dict[tuple[str, tuple[int, ...], int | None], list[StoredTensor]] = defaultdict(list)
    for stored in inventory.tensors.values():
        _, rule, shape, _, expert = stored.expected
        if rule.partition is not Partition.SKIPPED:
            alike[rule.pattern, shape, None if expert is None else owners[expert]].append(stored)
    kinds = []
    for members in alike.values():
        parts_of, parts = stored_parts(members[0].expected, config, layout, ranks, byte_layout)
        if parts:
            files = frozenset(stored.file for stored in members)
            kinds.append(_Kind(len(members), files, TensorCopy(members[0], parts, parts_of)))
    return kinds


def _rank_plan(rank: int, kinds: Iterable[_Kind]) -> RankPlan:
    held = [(kind.count, part) for kind in kinds for part in kind.copy.parts if rank in part.ranks]
    groups = {
        group: sum(count * part.nbytes for count, part in held if part.tensor.rule.group is group)
        for group in TensorGroup
        if any(part.tensor.rule.group is group for _, part in held)
    }
    return RankPlan(
        rank=rank,
        tensors=sum(count for count, _ in held),
        nbytes=sum(groups.values()),
        read_bytes=sum(count * part.source_nbytes for count, part in held),
        groups=groups,
    )


def _memory_bound(tensors: int, largest: int, threads: int) -> int:
    """Bytes; `largest` is what the tensor that needs most memory at a time needs besides the reused buffers."""
    under_way = min(threads * largest, max(MEMORY_BUDGET, largest))
    return tensors * _BOOKKEEPING_BYTES + threads * _BUFFERS_PER_THREAD * BLOCK_BYTES + under_way
