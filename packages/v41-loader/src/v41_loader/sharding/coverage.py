"""Whether the parts that ranks hold are the tensors: no gap, no overlap, scales with their weights."""

from __future__ import annotations

from collections.abc import Mapping

from v41_config.parallel_layout import ParallelLayout
from v41_loader.errors import ScalePairingError, ShardCoverageError
from v41_loader.partition import RankPart
from v41_loader.rules import Partition
from v41_loader.sharding.rank_contents import StoredPart


def require_union(parts: tuple[StoredPart, ...], layout: ParallelLayout) -> None:
    """Raise `ShardCoverageError` unless the parts held by all ranks make up a tensor once per TP group, or an expert
    once.
    """
    tensor = parts[0].tensor
    holders = [(rank, part) for part in parts for rank in part.ranks]
    if tensor.rule.partition is Partition.EXPERTS:
        if len(holders) != 1 or parts[0].part != RankPart(tensor.shape):
            raise ShardCoverageError(tensor.name, f"on ranks {[rank for rank, _ in holders]}", "the whole on one rank")
        return
    for group in range(layout.dp):
        held = sorted(
            (layout.tp_rank(rank), part.part.start, part.part.stop, part.part.axis)
            for rank, part in holders
            if layout.dp_rank(rank) == group
        )
        where = f"{tensor.name} in DP group {group}"
        if [tp_rank for tp_rank, *_ in held] != list(range(layout.tp)):
            raise ShardCoverageError(where, f"TP ranks {[h[0] for h in held]}", "one part on every TP rank")
        axis = tensor.rule.axis
        if axis is None:
            if any(part.part != RankPart(tensor.shape) for _, part in holders):
                raise ShardCoverageError(where, "a part", "the whole on every rank")
            continue
        edges = [0]
        for _, start, stop, part_axis in held:
            if part_axis != axis or start != edges[-1]:
                raise ShardCoverageError(where, f"a part from {start} along {part_axis}", f"{edges[-1]} along {axis}")
            edges.append(stop)
        if edges[-1] != tensor.shape[axis]:
            raise ShardCoverageError(where, f"parts up to {edges[-1]}", f"up to {tensor.shape[axis]}")


def require_scale_pairing(parts: tuple[StoredPart, ...], all_parts: Mapping[str, tuple[StoredPart, ...]]) -> None:
    """Raise `ScalePairingError` unless each part of a scale stands with the weight that it belongs to, and is cut where
    that is cut. Other tensors than scales pass.
    """
    for scale in parts:
        if scale.tensor.rule.scales is None:
            continue
        weights = all_parts.get(scale.tensor.name.removesuffix(".scale") + ".weight", ())
        weight = next((part for part in weights if part.number == scale.number), None)
        if weight is None or weight.ranks != scale.ranks or weight.tensor.rule.pattern != scale.tensor.rule.scales:
            found = "no weight" if weight is None else f"a weight on ranks {list(weight.ranks)}"
            raise ScalePairingError(scale.tensor.name, found, f"its weight on ranks {list(scale.ranks)}")
        if _logical_range(scale) != _logical_range(weight):
            raise ScalePairingError(
                scale.tensor.name,
                f"elements {_logical_range(scale)} of part {scale.number}",
                f"{_logical_range(weight)}, those of its weight",
            )


def _logical_range(part: StoredPart) -> tuple[int, int, int] | None:
    """Dimension, first and last element of a part; None of a whole tensor."""
    axis = part.part.axis
    if axis is None:
        return None
    extent = part.tensor.rule.item_extents[axis]
    return axis, part.part.start * extent, part.part.stop * extent
