"""A call's arguments, checked against the operator's contract before anything is launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from v41_kernels.errors import OperatorArgumentError
from v41_kernels.operator_spec import CountSpec, DataType, OperatorSpec, TensorSpec

TORCH_DTYPES: Mapping[DataType, torch.dtype] = {
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
    "INT32": torch.int32,
}


@dataclass
class BoundArguments:
    """One call, complete and consistent: every tensor, dimension, count and constant by name."""

    spec: OperatorSpec
    tensors: dict[str, Tensor]
    dims: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)


def bind(spec: OperatorSpec, given: Mapping[str, object]) -> BoundArguments:
    """Checks names, types, shapes, devices, memory and counts of a call.

    Errors: `OperatorArgumentError` naming operator and argument.
    """
    scalar_names = {scalar.name for scalar in spec.scalars}
    known = {tensor.name for tensor in spec.tensors} | scalar_names
    unknown = sorted(set(given) - known)
    if unknown:
        raise OperatorArgumentError(spec.name, f"unknown arguments {unknown}", f"some of {sorted(known)}")
    missing = sorted(known - scalar_names - set(given))
    if missing:
        raise OperatorArgumentError(spec.name, f"no {', '.join(missing)}", "every tensor argument")
    bound = BoundArguments(spec, {})
    for tensor in spec.tensors:
        bound.tensors[tensor.name] = _tensor(spec, tensor, given[tensor.name], bound.dims)
    _check_memory(bound)
    for scalar in spec.scalars:
        if isinstance(scalar, CountSpec):
            bound.counts[scalar.name] = _count(spec, scalar, given.get(scalar.name), bound.dims[scalar.limit])
        else:
            bound.constants[scalar.name] = _constant(spec, scalar.name, given.get(scalar.name, scalar.default))
    return bound


def _tensor(spec: OperatorSpec, declared: TensorSpec, value: object, dims: dict[str, int]) -> Tensor:
    where = f"{spec.name}: {declared.name}"
    if not isinstance(value, Tensor):
        raise OperatorArgumentError(where, type(value).__name__, f"a {declared.dtype} tensor {_shape(declared)}")
    if value.dtype != TORCH_DTYPES[declared.dtype]:
        raise OperatorArgumentError(where, str(value.dtype), f"dtype {declared.dtype}")
    if value.device.type != "cpu":
        raise OperatorArgumentError(where, f"device {value.device}", "a tensor in CPU memory")
    if value.dim() != len(declared.dims):
        raise OperatorArgumentError(where, f"shape {list(value.shape)}", f"shape {_shape(declared)}")
    for axis, (dim, size) in enumerate(zip(declared.dims, value.shape, strict=True)):
        wanted = dims.setdefault(dim, size) if isinstance(dim, str) else dim
        if size != wanted:
            raise OperatorArgumentError(where, f"size {size} in axis {axis}", f"{dim} = {wanted}")
    if not value.is_contiguous():
        raise OperatorArgumentError(where, f"strides {list(value.stride())}", "a contiguous tensor")
    return value


def _shape(declared: TensorSpec) -> str:
    return f"[{', '.join(map(str, declared.dims))}]"


def _count(spec: OperatorSpec, declared: CountSpec, value: object, limit: int) -> int:
    if value is None:
        return limit
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
        expected = f"an integer from 0 to {declared.limit} = {limit}"
        raise OperatorArgumentError(f"{spec.name}: {declared.name}", value, expected)
    return value


def _constant(spec: OperatorSpec, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise OperatorArgumentError(f"{spec.name}: {name}", value, "a number")
    return float(value)


def _check_memory(bound: BoundArguments) -> None:
    """A destination shares no memory with any other argument: kernels read and write in tile order."""
    spans = {
        name: (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())
        for name, tensor in bound.tensors.items()
    }
    for destination in bound.spec.destinations:
        start, end = spans[destination]
        for name, (other_start, other_end) in spans.items():
            if name != destination and start < other_end and other_start < end:
                where = f"{bound.spec.name}: {destination}"
                raise OperatorArgumentError(where, f"memory shared with {name}", "memory of its own")
