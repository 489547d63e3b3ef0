"""Which part of each tensor a rank holds: TP ranges along one axis, experts by EP (model.md sections 18 and 20)."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from v41_config.model_config import ModelConfig
from v41_config.parallel_layout import ParallelLayout
from v41_loader.errors import ShardingError
from v41_loader.expected_tensors import ExpectedTensor
from v41_loader.rules import Partition


@dataclass(frozen=True, slots=True)
class RankPart:
    """Stored items `[start, stop)` along `axis`; a whole tensor where `axis` is None."""

    shape: tuple[int, ...]
    axis: int | None = None
    start: int = 0
    stop: int = 0


def rank_part(tensor: ExpectedTensor, config: ModelConfig, layout: ParallelLayout, rank: int) -> RankPart | None:
    """The part of a tensor that a rank holds; None for another rank's expert and for skipped groups.

    Raises:
        LayoutError: the layout does not divide the config, or has no such rank.
        ShardingError: a cut would fall inside a packed byte or a scale's tile.
    """
    layout.check(config)
    match tensor.rule.partition:
        case Partition.SKIPPED:
            return None
        case Partition.REPLICATED:
            return RankPart(tensor.shape)
        case Partition.EXPERTS:
            assert tensor.expert is not None
            owned = layout.expert_owner(config, tensor.expert) == layout.ep_rank(rank)
            return RankPart(tensor.shape) if owned else None
        case Partition.HEADS:
            units, count = layout.head_range(config, rank), config.num_attention_heads
        case Partition.OUTPUT_GROUPS:
            units, count = layout.output_group_range(config, rank), config.o_groups
        case Partition.VOCABULARY:
            units, count = layout.vocab_range(config, rank), config.vocab_size
    axis = tensor.rule.axis
    assert axis is not None
    start, stop = (_items(tensor, axis, edge, count, layout) for edge in (units.start, units.stop))
    shape = (*tensor.shape[:axis], stop - start, *tensor.shape[axis + 1 :])
    return RankPart(shape, axis, start, stop)


def _items(tensor: ExpectedTensor, axis: int, edge: int, count: int, layout: ParallelLayout) -> int:
    """The stored item at which unit `edge` of `count` begins."""
    items, inside = divmod(tensor.shape[axis] * edge, count)
    if inside:
        raise ShardingError(
            f"{tensor.name} over tp={layout.tp}",
            f"{tensor.shape[axis]} stored items along dimension {axis} for {count} units",
            f"a cut between tiles of {tensor.rule.item_extents[axis]}",
        )
    return items


@dataclass(frozen=True, slots=True)
class SharedPart:
    """A part of a tensor, and the ranks that hold it."""

    part: RankPart
    ranks: tuple[int, ...]


def checked_ranks(config: ModelConfig, layout: ParallelLayout, ranks: Iterable[int] | None) -> tuple[int, ...]:
    """The ranks that were asked for, in order and once each; None asks for all of the layout.

    Raises:
        LayoutError: the layout does not divide the config (before its ranks are counted), or lacks one of these.
        ShardingError: none was asked for.
    """
    layout.check(config)
    wanted = tuple(range(layout.world_size)) if ranks is None else tuple(sorted(set(ranks)))
    if not wanted:
        raise ShardingError("ranks", wanted, "at least one rank")
    for rank in wanted:
        layout.tp_rank(rank)  # raises where there is no such rank
    return wanted


@functools.lru_cache(maxsize=4096)
def _whole_on(shape: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[SharedPart, ...]:
    """One object for the many tensors, experts most of them, that are alike."""
    return (SharedPart(RankPart(shape), ranks),)


def tensor_parts(tensor: ExpectedTensor, config: ModelConfig, layout: ParallelLayout) -> tuple[SharedPart, ...]:
    """The different parts of a tensor, in the order in which they make it up: one per TP rank where TP cuts it, else
    the whole; none of a skipped group. Errors as `rank_part`, which says the same from the side of one rank.
    """
    world = range(layout.world_size)
    match tensor.rule.partition:
        case Partition.SKIPPED:
            return ()
        case Partition.REPLICATED:
            return _whole_on(tensor.shape, tuple(world))
        case Partition.EXPERTS:
            assert tensor.expert is not None
            return _whole_on(tensor.shape, (layout.expert_owner(config, tensor.expert),))
    parts = []
    for tp_rank in range(layout.tp):
        part = rank_part(tensor, config, layout, tp_rank)
        assert part is not None
        parts.append(SharedPart(part, tuple(rank for rank in world if layout.tp_rank(rank) == tp_rank)))
    return tuple(parts)
