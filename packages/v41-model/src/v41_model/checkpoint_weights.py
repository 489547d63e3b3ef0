"""Weights out of a directory: a rank's part, or the whole text model, a layer in memory at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias, overload

from v41_config import ParallelLayout
from v41_goldens.weights import LayerWeights, ModelWeights
from v41_loader import Checkpoint, ShardedCheckpoint, load_rank
from v41_model.rank_forward import RankModel

__all__ = ["StoredWeights", "StreamedLayers", "load_rank_model", "streamed_weights"]

StoredWeights: TypeAlias = "Checkpoint | ShardedCheckpoint"
"""An open directory in the released format, or one that was sharded for a layout."""

_LAYER = re.compile(r"layers\.(\d+)\.")


def load_rank_model(weights: StoredWeights, layout: ParallelLayout, rank: int) -> RankModel:
    """Read what ``rank`` holds, and no more.

    Errors: :class:`v41_config.LayoutError` when the layout does not divide the model; the loader's errors, also for
    shards of another layout.
    """
    layout.check(weights.config)
    return RankModel.from_tensors(weights.config, layout, rank, dict(load_rank(weights, layout, rank)))


class StreamedLayers(Sequence[LayerWeights]):
    """The layers of a checkpoint, each read when it is asked for and kept by nobody else."""

    def __init__(self, checkpoint: Checkpoint, on_read: Callable[[int], None] | None = None) -> None:
        self._checkpoint, self._on_read = checkpoint, on_read
        self._names: dict[int, list[str]] = {}
        for name in checkpoint.names:
            if match := _LAYER.match(name):
                self._names.setdefault(int(match[1]), []).append(name)

    def __len__(self) -> int:
        return self._checkpoint.config.num_hidden_layers

    @overload
    def __getitem__(self, index: int) -> LayerWeights: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LayerWeights]: ...
    def __getitem__(self, index: int | slice) -> LayerWeights | Sequence[LayerWeights]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        tensors = self._checkpoint.read(self._names[range(len(self))[index]])
        weights = LayerWeights.from_tensors(self._checkpoint.config, index, tensors)
        if self._on_read is not None:
            self._on_read(index)
        return weights


def streamed_weights(checkpoint: Checkpoint, on_read: Callable[[int], None] | None = None) -> ModelWeights:
    """Embedding, norm and head in memory, layers streamed; `on_read(layer_id)` is told of each layer read."""
    outer = checkpoint.read(["embed.weight", "norm.weight", "head.weight"])
    return ModelWeights(
        embed=outer["embed.weight"],
        layers=StreamedLayers(checkpoint, on_read),
        norm=outer["norm.weight"],
        head=outer["head.weight"],
    )
