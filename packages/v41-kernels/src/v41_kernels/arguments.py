"""A call's arguments, checked against the operator's contract before anything is launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import SupportsIndex

from torch import Tensor

from v41_config import FLASH, OperatorError, OperatorSpec
from v41_config.dimensions import DIMENSIONS, symbols_of
from v41_config.operator_spec import ConstantSpec, CountSpec


@dataclass(frozen=True)
class BoundArguments:
    """One call, complete and consistent: every tensor, dimension, count and constant by name."""

    spec: OperatorSpec
    tensors: Mapping[str, Tensor]
    dims: Mapping[str, int]
    counts: Mapping[str, int]
    constants: Mapping[str, float]

    @property
    def static_dims(self) -> dict[str, int]:
        """The sizes that a kernel is built for: all but the numbers of rows, which stand first and differ by call."""
        rows = {tensor.dims[0] for tensor in self.spec.tensors}
        widths = {symbol for tensor in self.spec.tensors for dim in tensor.dims[1:] for symbol in symbols_of(dim)}
        return {
            symbol: size
            for symbol, size in self.dims.items()
            if symbol in widths or symbol not in rows or DIMENSIONS[symbol].of_model is not None
        }


def bind(spec: OperatorSpec, given: Mapping[str, object]) -> BoundArguments:
    """Checks a call and fills in its scalars: a count is its limit, a constant that of the released model.

    Beyond the contract, tensors are torch's, contiguous and in CPU memory, and a destination shares memory with no
    other argument. Errors: `OperatorError` naming operator and argument.
    """
    dims = spec.check(given)
    tensors = {declared.name: _tensor(spec, declared.name, given[declared.name]) for declared in spec.tensors}
    _check_memory(spec, tensors)
    counts: dict[str, int] = {}
    constants: dict[str, float] = {}
    for scalar in spec.scalars:
        value = given.get(scalar.name)
        if isinstance(scalar, CountSpec):
            counts[scalar.name] = value.__index__() if isinstance(value, SupportsIndex) else dims[scalar.limit]
        else:
            constants[scalar.name] = _constant(scalar, value)
    return BoundArguments(spec, tensors, dims, counts, constants)


def _constant(declared: ConstantSpec, value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else float(declared.resolve(FLASH))


def _tensor(spec: OperatorSpec, name: str, value: object) -> Tensor:
    where = f"{spec.name}: {name}"
    if not isinstance(value, Tensor):
        raise OperatorError(where, type(value).__name__, "a torch tensor")
    if value.device.type != "cpu":
        raise OperatorError(where, f"device {value.device}", "a tensor in CPU memory")
    if not value.is_contiguous():
        raise OperatorError(where, f"strides {list(value.stride())}", "a contiguous tensor")
    return value


def _check_memory(spec: OperatorSpec, tensors: Mapping[str, Tensor]) -> None:
    """A destination shares no memory with any other argument: kernels read and write in tile order."""
    spans = {
        name: (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())
        for name, tensor in tensors.items()
    }
    for destination in spec.destinations:
        start, end = spans[destination]
        for name, (other_start, other_end) in spans.items():
            if name != destination and start < other_end and other_start < end:
                raise OperatorError(f"{spec.name}: {destination}", f"memory shared with {name}", "memory of its own")
