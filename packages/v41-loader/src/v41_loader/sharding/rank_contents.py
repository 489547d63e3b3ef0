"""What the rank files of a layout hold: every part of every tensor, its form and its place. No torch, no payload."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from v41_config.model_config import ModelConfig
from v41_config.parallel_layout import ParallelLayout
from v41_loader.expected_tensors import ExpectedTensor, expected_tensors
from v41_loader.header import encode_header
from v41_loader.header_entries import TensorEntry
from v41_loader.layouts import Layout, Transform
from v41_loader.partition import RankPart, tensor_parts
from v41_loader.rules import DTYPE_BYTES, TensorGroup

TRANSFORM_SCRATCH = 2 << 20
"""Bytes that no transform exceeds besides what it takes and gives."""


def rank_file(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank:02d}.safetensors"


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One part of a tensor as rank files store it: `dtype` and `shape` after `transform` (None: bytes as they are).

    `number` counts the parts of the tensor; `ranks` are those that hold this one.
    """

    tensor: ExpectedTensor
    number: int
    part: RankPart
    ranks: tuple[int, ...]
    transform: Transform | None
    dtype: str
    shape: tuple[int, ...]

    @property
    def source_nbytes(self) -> int:
        """Bytes that the part takes in the checkpoint."""
        return math.prod(self.part.shape) * DTYPE_BYTES[self.tensor.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in each rank's file."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def block_nbytes(self) -> int:
        """Bytes of a rank file that stand for one block of the transform."""
        if self.transform is None:
            return self.nbytes
        return self.nbytes * min(self.transform.rows_per_block, self.part.shape[0]) // self.part.shape[0]

    @property
    def working_memory(self) -> int:
        """Bytes that transforming a block needs, either way: the block, its image and what lies between."""
        if self.transform is None:
            return 0
        return self.block_nbytes + self.source_nbytes * self.block_nbytes // self.nbytes + TRANSFORM_SCRATCH


@dataclass(frozen=True)
class GroupContents:
    """What ranks hold of one class: `tensors`, `scales` of them scales; `nbytes` is what these parts take in the
    checkpoint, `stored_nbytes` what they take in the rank files, each rank's copy counted.
    """

    group: TensorGroup
    tensors: int
    scales: int
    nbytes: int
    stored_nbytes: int

    def to_json(self) -> dict[str, object]:
        """As JSON values."""
        return {
            "class": self.group.value,
            "tensors": self.tensors,
            "scales": self.scales,
            "source_bytes": self.nbytes,
            "rank_file_bytes": self.stored_nbytes,
        }


@dataclass(frozen=True)
class RankContents:
    """What ranks hold: their parts by tensor, in the order of `expected_tensors`, and header and entries by rank.

    `parts_of` counts the parts of each tensor, those that none of these ranks holds included.
    """

    parts: Mapping[str, tuple[StoredPart, ...]]
    parts_of: Mapping[str, int]
    headers: Mapping[int, bytes]
    entries: Mapping[int, Mapping[str, TensorEntry]]

    def nbytes(self, rank: int) -> int:
        """The size of a rank's file."""
        return max((entry.end for entry in self.entries[rank].values()), default=len(self.headers[rank]))

    def groups(self) -> tuple[GroupContents, ...]:
        """One entry per class that occurs, in the order of `TensorGroup`."""
        held: dict[TensorGroup, list[tuple[StoredPart, ...]]] = {}
        for parts in self.parts.values():
            if parts:
                held.setdefault(parts[0].tensor.rule.group, []).append(parts)
        return tuple(
            GroupContents(
                group,
                len(members),
                sum(parts[0].tensor.rule.scales is not None for parts in members),
                sum(part.source_nbytes for parts in members for part in parts),
                sum(part.nbytes * len(part.ranks) for parts in members for part in parts),
            )
            for group in TensorGroup
            if (members := held.get(group))
        )


def rank_contents(
    config: ModelConfig, layout: ParallelLayout, ranks: Iterable[int], weight_layout: Layout
) -> RankContents:
    """The contents of the files of some ranks.

    Raises:
        LayoutError, ShardingError: as `rank_part`; and what `weight_layout` raises for a tensor it cannot hold.
    """
    wanted = set(ranks)
    parts: dict[str, tuple[StoredPart, ...]] = {}
    parts_of: dict[str, int] = {}
    tensors: dict[int, list[tuple[str, str, tuple[int, ...]]]] = {rank: [] for rank in sorted(wanted)}
    for rank in tensors:
        layout.tp_rank(rank)  # raises where the layout has no such rank
    for name, tensor in expected_tensors(config).items():
        count, held = stored_parts(tensor, config, layout, wanted, weight_layout)
        if not count:
            continue
        parts_of[name], parts[name] = count, held
        for stored in held:
            for rank in stored.ranks:
                tensors[rank].append((name, stored.dtype, stored.shape))
    encoded = {rank: encode_header(members) for rank, members in tensors.items()}
    return RankContents(
        parts,
        parts_of,
        {rank: header for rank, (header, _) in encoded.items()},
        {rank: entries for rank, (_, entries) in encoded.items()},
    )


def stored_parts(
    tensor: ExpectedTensor, config: ModelConfig, layout: ParallelLayout, ranks: Set[int], weight_layout: Layout
) -> tuple[int, tuple[StoredPart, ...]]:
    """How many parts a tensor has, and those of them that some of `ranks` hold; errors as `rank_contents`."""
    shared = tensor_parts(tensor, config, layout)
    held = []
    for number, part in enumerate(shared):
        holders = part.ranks if ranks >= set(part.ranks) else tuple(rank for rank in part.ranks if rank in ranks)
        if holders:
            held.append(_stored(tensor, number, part.part, holders, weight_layout))
    return len(shared), tuple(held)


def _stored(
    tensor: ExpectedTensor, number: int, part: RankPart, ranks: tuple[int, ...], weight_layout: Layout
) -> StoredPart:
    transform = weight_layout.transform(tensor, part.shape)
    if transform is None:
        return StoredPart(tensor, number, part, ranks, None, tensor.dtype, part.shape)
    return StoredPart(tensor, number, part, ranks, transform, transform.output_dtype, tuple(transform.output_shape))
