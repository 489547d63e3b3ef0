"""Weights whose products are plain matmuls: the fast arithmetic of linears from packed bytes and of hyper-connections.

Operands are the exact ones, since dequantised activations and weights fit BF16; what differs from E1 is the order of
the sum, taken in FP32, and that a quantised linear's result is rounded to BF16 at once. Everything else of an operator
stays as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from v41_goldens import row_tiles
from v41_goldens.quantized_weights import Fp4Weight, Fp8Weight
from v41_goldens.weights import AttentionWeights, HyperConnectionWeights, LayerWeights, ModelWeights

Weights = TypeVar("Weights")


@dataclass(frozen=True, eq=False)
class FastFp8Weight(Fp8Weight):
    """An `Fp8Weight` that multiplies in BF16."""

    def dot(self, x: Tensor) -> Tensor:
        """BF16 `[..., N]` of dequantised rows `x [..., K]`."""
        return _dot(x, self)


@dataclass(frozen=True, eq=False)
class FastFp4Weight(Fp4Weight):
    """An `Fp4Weight` that multiplies in BF16."""

    def dot(self, x: Tensor) -> Tensor:
        """BF16 `[..., N]` of dequantised rows `x [..., K]`."""
        return _dot(x, self)


@dataclass(frozen=True, eq=False)
class FastHyperConnectionWeights(HyperConnectionWeights):
    """`HyperConnectionWeights` that sum in FP32."""

    def project(self, streams: Tensor) -> Tensor:
        """FP32 `[T, M]` of streams FP32 `[T, HC*D]`."""
        return row_tiles.fp32_linear(streams, self.fn)


_FAST: dict[type, type] = {
    Fp8Weight: FastFp8Weight,
    Fp4Weight: FastFp4Weight,
    HyperConnectionWeights: FastHyperConnectionWeights,
}


def _dot(x: Tensor, w: Fp8Weight | Fp4Weight) -> Tensor:
    rows = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
    product = row_tiles.matmul(rows, w.shape[0], w.decoder(torch.bfloat16))
    return product.view(*x.shape[:-1], w.shape[0])


def fast_layer(weights: LayerWeights) -> LayerWeights:
    """The same tensors, multiplied fast where they are quantised or mix streams."""
    return _exchanged(weights, _FAST)


def fast_model(weights: ModelWeights) -> ModelWeights:
    """The same for a whole model; layers that are loaded when they are asked for still are."""
    return dataclasses.replace(weights, layers=_FastLayers(weights.layers))


def exact_attention(weights: AttentionWeights) -> AttentionWeights:
    """The same packed bytes, multiplied by E1: what a judge computes its references from."""
    return _exchanged(weights, {exact: exact for exact in _FAST})


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


def _exchanged(weights: Weights, classes: Mapping[type, type]) -> Weights:
    """A dataclass of weights, and in it, however deep, whatever is of a class, or of one derived from it, made anew as
    one of another class from the fields of the first.
    """

    def exchanged(value: Any) -> Any:
        for base, other in classes.items():
            if isinstance(value, base):
                return other(**{field.name: getattr(value, field.name) for field in dataclasses.fields(base)})
        if isinstance(value, dict):
            return {key: exchanged(part) for key, part in value.items()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: exchanged(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
            return dataclasses.replace(value, **fields)
        return value

    found: Weights = exchanged(weights)
    return found
