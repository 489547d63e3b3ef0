"""Quantised weights whose products are BF16 matmuls: the fast arithmetic of every linear from packed bytes.

Operands are the exact ones, since dequantised activations and weights fit BF16; what differs from E1 is the order of
the sum, taken in FP32, and that the result is rounded to BF16 at once. Everything else of an operator stays as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from v41_goldens import row_tiles
from v41_goldens.weights import AttentionWeights, Fp4Weight, Fp8Weight, LayerWeights, ModelWeights

Weights = TypeVar("Weights")


@dataclass(frozen=True, eq=False)
class FastFp8Weight(Fp8Weight):
    """An `Fp8Weight` that multiplies in BF16."""

    def dot(self, x: Tensor) -> Tensor:
        """FP32 `[..., N]`, each a BF16 number, of dequantised rows `x [..., K]`."""
        return _dot(x, self)


@dataclass(frozen=True, eq=False)
class FastFp4Weight(Fp4Weight):
    """An `Fp4Weight` that multiplies in BF16."""

    def dot(self, x: Tensor) -> Tensor:
        """FP32 `[..., N]`, each a BF16 number, of dequantised rows `x [..., K]`."""
        return _dot(x, self)


def _dot(x: Tensor, w: Fp8Weight | Fp4Weight) -> Tensor:
    rows = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
    product = row_tiles.matmul(rows, w.shape[0], lambda start, stop: w.rows(start, stop).dequantize(torch.bfloat16))
    return product.view(*x.shape[:-1], w.shape[0]).to(torch.float32)


def fast_layer(weights: LayerWeights) -> LayerWeights:
    """The same packed bytes, every quantised matrix multiplied fast."""
    return _exchanged(weights, FastFp8Weight, FastFp4Weight)


def fast_model(weights: ModelWeights) -> ModelWeights:
    """The same for a whole model; layers that are loaded when they are asked for still are."""
    return dataclasses.replace(weights, layers=_FastLayers(weights.layers))


def exact_attention(weights: AttentionWeights) -> AttentionWeights:
    """The same packed bytes, multiplied by E1: what a judge computes its references from."""
    return _exchanged(weights, Fp8Weight, Fp4Weight)


class _FastLayers(Sequence[LayerWeights]):
    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        self._layers = layers

    @overload
    def __getitem__(self, index: int) -> LayerWeights: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LayerWeights]: ...
    def __getitem__(self, index: int | slice) -> LayerWeights | Sequence[LayerWeights]:
        found = self._layers[index]
        return fast_layer(found) if isinstance(found, LayerWeights) else _FastLayers(found)

    def __len__(self) -> int:
        return len(self._layers)


def _exchanged(weights: Weights, fp8: type[Fp8Weight], fp4: type[Fp4Weight]) -> Weights:
    """A dataclass of weights with every quantised matrix in it of the given classes, however deep."""

    def exchanged(value: Any) -> Any:
        if isinstance(value, Fp8Weight):
            return fp8(value.codes, value.scale)
        if isinstance(value, Fp4Weight):
            return fp4(value.packed, value.scale)
        if isinstance(value, dict):
            return {key: exchanged(part) for key, part in value.items()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.replace(
                value, **{field.name: exchanged(getattr(value, field.name)) for field in dataclasses.fields(value)}
            )
        return value

    found: Weights = exchanged(weights)
    return found
