"""What sharding a checkpoint will read, write and take, known before a byte of payload is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from v41_config.parallel_layout import ParallelLayout
from v41_loader.errors import ShardingError
from v41_loader.inventory import GroupTotal, Inventory, StoredTensor
from v41_loader.layouts import get_layout
from v41_loader.rules import TensorGroup
from v41_loader.sharding.part_blocks import BLOCK_BYTES
from v41_loader.sharding.rank_contents import stored_parts
from v41_loader.sharding.rank_file_writer import MEMORY_BUDGET, default_threads
from v41_loader.sharding.tensor_copy import TensorCopy

_BUFFERS_PER_THREAD = 2
"""Whole rows, and a part's piece of them."""

_BOOKKEEPING_BYTES = 3 << 10
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
            "skipped": {total.group.value: {"tensors": total.tensors, "bytes": total.nbytes} for total in self.skipped},
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
    wanted = tuple(range(layout.world_size)) if ranks is None else tuple(sorted(set(ranks)))
    if not wanted:
        raise ShardingError("ranks", wanted, "at least one rank")
    layout.check(inventory.config)
    for rank in wanted:
        layout.tp_rank(rank)  # raises where the layout has no such rank
    tensors, needed, groups = dict.fromkeys(wanted, 0), dict.fromkeys(wanted, 0), {rank: {} for rank in wanted}  # type: dict[int, int], dict[int, int], dict[int, dict[TensorGroup, int]]
    files: set[str] = set()
    copied = read = written = largest = 0
    for members in _alike(inventory, layout):
        count, copy = len(members), _copy_of(members[0], inventory, layout, set(wanted), weight_layout)
        if not copy.parts:
            continue
        files |= {stored.file for stored in members}
        copied += count
        read += count * copy.read_bytes
        written += count * copy.written_bytes
        largest = max(largest, copy.working_memory)
        group = members[0].expected.rule.group
        for part in copy.parts:
            for rank in part.ranks:
                tensors[rank] += count
                needed[rank] += count * part.source_nbytes
                groups[rank][group] = groups[rank].get(group, 0) + count * part.nbytes
    totals = inventory.group_totals()
    return ShardPlan(
        layout,
        weight_layout,
        tuple(
            RankPlan(rank, tensors[rank], sum(groups[rank].values()), needed[rank], _in_order(groups[rank]))
            for rank in wanted
        ),
        copied,
        read,
        written,
        len(files),
        len(inventory.files),
        len(inventory.tensors),
        sum(total.nbytes for total in totals),
        _memory_bound(len(inventory.tensors), largest, threads or default_threads()),
        tuple(total for total in totals if total.skipped),
        inventory.notice,
    )
