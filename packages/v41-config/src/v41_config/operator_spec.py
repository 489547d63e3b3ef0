"""The operator ABI: which tensors an operator takes and writes, as data.

A spec is what an operator's golden and its kernel agree on, and the source of fixtures, argument checks and
documentation. `check` works on anything that has `.shape` and `.dtype`: NumPy arrays and torch tensors alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal, SupportsIndex

from v41_config.data_types import DATA_TYPE_BYTES, DataType, data_type_name
from v41_config.dimensions import CONSTANTS, DIMENSIONS, Dim, evaluate, model_sizes, symbols_of
from v41_config.errors import OperatorError
from v41_config.model_config import ModelConfig
from v41_config.parallel_layout import ParallelLayout

Direction = Literal["in", "out", "inout"]


@dataclass(frozen=True)
class TensorSpec:
    """A tensor argument. `dims` are sizes or expressions over the symbols of `DIMENSIONS`; equal symbols, equal sizes.

    An `out` tensor is a destination that the caller provides; rows that the operator does not name stay untouched.
    """

    name: str
    dims: tuple[Dim, ...]
    dtype: DataType
    direction: Direction = "in"

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class CountSpec:
    """A run-time integer from 0 to the size of `limit`, which is also its default unless it is `required`."""

    name: str
    limit: str
    required: bool = False


@dataclass(frozen=True)
class ConstantSpec:
    """A number fixed for a model: `value` names a field of `ModelConfig`, or is the default itself."""

    name: str
    value: str | int | float

    def resolve(self, config: ModelConfig) -> int | float:
        """The number for a model."""
        value = getattr(config, self.value) if isinstance(self.value, str) else self.value
        assert isinstance(value, (int, float))
        return value


@dataclass(frozen=True)
class OperatorSpec:
    """One operator: name, tensors in call order, scalars, and in `doc` what it computes and which page says so.

    Rows at and behind a count that limits `T` are padding: neither read nor, in destinations, written.
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
    def symbols(self) -> tuple[str, ...]:
        """The symbols of all dimensions, in order of appearance, constants left out."""
        dims = [dim for tensor in self.tensors for dim in tensor.dims]
        limits = [scalar.limit for scalar in self.scalars if isinstance(scalar, CountSpec)]
        seen = dict.fromkeys(symbol for dim in (*dims, *limits) for symbol in symbols_of(dim))
        return tuple(symbol for symbol in seen if symbol not in CONSTANTS)

    @property
    def given(self) -> tuple[str, ...]:
        """The symbols that `bind` must be told, in order."""
        needed = (DIMENSIONS[symbol].needs or symbol for symbol in self.symbols)
        return tuple(dict.fromkeys(symbol for symbol in needed if DIMENSIONS[symbol].given))

    def bind(self, config: ModelConfig, layout: ParallelLayout | None = None, **extents: int) -> BoundOperator:
        """Concrete shapes for a model, a layout (one rank where None) and the extents of a call.

        Args:
            extents: a size for each of `given`, such as `T=192, B=32`; 0 is a size. Those that this operator has no
                use for are let by, so that one set serves all operators of a step.

        Raises:
            OperatorError: an extent that is missing, that no call gives, or that is no integer of at least 0.
            LayoutError: the layout does not divide the model.
        """
        layout = layout or ParallelLayout()
        for symbol, extent in extents.items():
            self._check_extent(symbol, extent)
        if missing := [symbol for symbol in self.given if symbol not in extents]:
            meanings = "; ".join(f"{symbol}, {DIMENSIONS[symbol].meaning}" for symbol in missing)
            raise OperatorError(f"{self.name}: bind", f"no {', '.join(missing)}", f"sizes of {meanings}")
        sizes = model_sizes(config, layout) | {symbol: extents[symbol] for symbol in self.given}
        for symbol in self.symbols:
            of_call = DIMENSIONS[symbol].of_call
            if of_call is not None:
                sizes[symbol] = of_call(config, layout, sizes)
        tensors = {t.name: BoundTensor(t, tuple(self.size(t, dim, sizes) for dim in t.dims)) for t in self.tensors}
        constants = {s.name: s.resolve(config) for s in self.scalars if isinstance(s, ConstantSpec)}
        dims = {symbol: sizes[symbol] for symbol in self.symbols}
        return BoundOperator(self, config, layout, tensors, dims, constants)

    def _check_extent(self, symbol: str, extent: object) -> None:
        if symbol not in DIMENSIONS or not DIMENSIONS[symbol].given:
            givable = [d.symbol for d in DIMENSIONS.values() if d.given]
            raise OperatorError(f"{self.name}: {symbol}", extent, f"extents among {_listed(givable)}")
        if isinstance(extent, bool) or not isinstance(extent, int) or extent < 0:
            raise OperatorError(f"{self.name}: {symbol}", extent, f"{DIMENSIONS[symbol].meaning}, at least 0")

    def size(self, tensor: TensorSpec, dim: Dim, sizes: Mapping[str, int]) -> int:
        """One dimension of a tensor, given the size of each of its symbols.

        Raises:
            OperatorError: a division in it leaves a remainder.
        """
        try:
            return evaluate(dim, sizes)
        except OperatorError as error:
            where = f"{self.name}: {tensor.name}"
            raise OperatorError(where, error.found, f"{tensor} with {error.where} {error.expected}") from None

    def check(self, arguments: Mapping[str, object], outputs: bool = True) -> dict[str, int]:
        """Check a call's arguments against one another: names, dtypes, ranks, equal sizes for equal symbols, counts.

        Args:
            arguments: by name; scalars that have a default may be left out.
            outputs: whether destinations are among them; False for a function that returns what it writes.

        Returns:
            The size of each symbol that a tensor shows alone, as one of its dimensions.

        Raises:
            OperatorError: naming operator and argument, with what was expected and found.
        """
        return _check(self, arguments, outputs, {})


@dataclass(frozen=True)
class BoundTensor:
    """A tensor argument with its concrete shape."""

    spec: TensorSpec
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * DATA_TYPE_BYTES[self.spec.dtype]


@dataclass(frozen=True)
class BoundOperator:
    """An operator for one model, layout and call: what to allocate, and what arguments must look like."""

    spec: OperatorSpec
    config: ModelConfig
    layout: ParallelLayout
    tensors: Mapping[str, BoundTensor]
    dims: Mapping[str, int]
    constants: Mapping[str, int | float] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor by name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def check(self, arguments: Mapping[str, object], outputs: bool = True) -> None:
        """`OperatorSpec.check`, with every size known beforehand."""
        _check(self.spec, arguments, outputs, self.dims)


def _check(
    spec: OperatorSpec, arguments: Mapping[str, object], outputs: bool, known: Mapping[str, int]
) -> dict[str, int]:
    expected = [tensor for tensor in spec.tensors if outputs or tensor.direction != "out"]
    names = [tensor.name for tensor in expected] + [scalar.name for scalar in spec.scalars]
    for name in arguments:
        if name not in names:
            raise OperatorError(f"{spec.name}: {name}", "an unknown argument", f"arguments {_listed(names)}")
    sizes = {**CONSTANTS, **known}
    shapes: list[tuple[TensorSpec, tuple[int, ...]]] = []
    for tensor in expected:
        shape = _shape_of(spec, tensor, arguments)
        shapes.append((tensor, shape))
        for dim, size in zip(tensor.dims, shape, strict=True):
            if isinstance(dim, str) and symbols_of(dim) == (dim,):
                sizes.setdefault(dim, size)
    for tensor, shape in shapes:
        _check_sizes(spec, tensor, shape, sizes)
    for scalar in spec.scalars:
        if scalar.name in arguments:
            _check_scalar(spec, scalar, arguments[scalar.name], sizes)
        elif isinstance(scalar, CountSpec) and scalar.required:
            raise OperatorError(f"{spec.name}: {scalar.name}", "no argument", f"an integer of at most {scalar.limit}")
    return {symbol: sizes[symbol] for symbol in spec.symbols if symbol in sizes}


def _shape_of(spec: OperatorSpec, tensor: TensorSpec, arguments: Mapping[str, object]) -> tuple[int, ...]:
    where = f"{spec.name}: {tensor.name}"
    if tensor.name not in arguments:
        raise OperatorError(where, "no argument", str(tensor))
    value = arguments[tensor.name]
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        raise OperatorError(where, type(value).__name__, str(tensor))
    if data_type_name(dtype) != tensor.dtype:
        raise OperatorError(where, data_type_name(dtype), str(tensor))
    if len(shape) != len(tensor.dims):
        raise OperatorError(where, list(shape), str(tensor))
    return tuple(int(size) for size in shape)


def _check_sizes(spec: OperatorSpec, tensor: TensorSpec, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    """An expression over symbols that no argument shows is a size of its own: equal expressions, equal sizes."""
    where = f"{spec.name}: {tensor.name}"
    for dim, size in zip(tensor.dims, shape, strict=True):
        if all(symbol in sizes for symbol in symbols_of(dim)):
            wanted = spec.size(tensor, dim, sizes)
        else:
            wanted = sizes.setdefault(str(dim), size)
        if size != wanted:
            raise OperatorError(where, list(shape), f"{tensor} with {dim} = {wanted}")


def _check_scalar(
    spec: OperatorSpec, scalar: CountSpec | ConstantSpec, value: object, sizes: Mapping[str, int]
) -> None:
    where = f"{spec.name}: {scalar.name}"
    if isinstance(scalar, ConstantSpec):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise OperatorError(where, value, "a number")
        return
    limit = sizes.get(scalar.limit)
    count = value.__index__() if isinstance(value, SupportsIndex) and not isinstance(value, bool) else -1
    if count < 0 or (limit is not None and count > limit):
        bound = scalar.limit if limit is None else f"{scalar.limit} = {limit}"
        raise OperatorError(where, value, f"an integer from 0 to {bound}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
