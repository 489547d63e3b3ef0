"""What an operator takes and writes, as data: the contract that a kernel and its golden share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Direction = Literal["in", "out", "inout"]
DataType = Literal["BF16", "FP32", "INT32"]

DYNAMIC_DIMS = frozenset({"T", "CAPACITY"})
"""Dimensions that change from call to call; a kernel takes any value of them without being built anew."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor argument. `dims` are symbols ("T", "D") or numbers; equal symbols mean equal sizes."""

    name: str
    dims: tuple[str | int, ...]
    dtype: DataType
    direction: Direction = "in"


@dataclass(frozen=True)
class CountSpec:
    """A run-time integer in `[0, limit]`, handed to the kernel as INT32 `[1]`; it defaults to `limit`."""

    name: str
    limit: str


@dataclass(frozen=True)
class ConstantSpec:
    """A number that is fixed when the kernel is built."""

    name: str
    default: float


@dataclass(frozen=True)
class OperatorSpec:
    """An operator's name, tensors, scalars and meaning.

    Rows at and behind a count that limits "T" are padding: an operator neither reads them from its inputs nor writes
    them in its destinations.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    scalars: tuple[CountSpec | ConstantSpec, ...]
    doc: str

    @property
    def destinations(self) -> tuple[str, ...]:
        """Names of the tensors that the operator writes."""
        return tuple(tensor.name for tensor in self.tensors if tensor.direction != "in")

    @property
    def static_dims(self) -> tuple[str, ...]:
        """Symbols that a kernel is built for, in order of appearance."""
        symbols = (dim for tensor in self.tensors for dim in tensor.dims if isinstance(dim, str))
        return tuple(dim for dim in dict.fromkeys(symbols) if dim not in DYNAMIC_DIMS)

    @property
    def counts(self) -> tuple[CountSpec, ...]:
        return tuple(scalar for scalar in self.scalars if isinstance(scalar, CountSpec))

    @property
    def constants(self) -> tuple[ConstantSpec, ...]:
        return tuple(scalar for scalar in self.scalars if isinstance(scalar, ConstantSpec))
