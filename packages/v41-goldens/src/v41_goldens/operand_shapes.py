"""Shapes of a golden's operands, held to the operator's contract: Torch would broadcast some of the wrong ones."""

from __future__ import annotations

from torch import Tensor

from v41_config import find_operator
from v41_config.dimensions import CONSTANTS, evaluate, symbols_of
from v41_goldens.errors import OperandError


def check_shapes(operator: str, *, any_rows: bool = False, **operands: Tensor) -> None:
    """Check tensors of a call by their names in the operator's contract; equal symbols, equal sizes.

    With `any_rows` the rows `T` may be any number of leading dimensions. Dtypes are the caller's.

    Raises:
        OperandError: naming operator and operand, with the contract's dimensions.
    """
    sizes: dict[str, int] = dict(CONSTANTS)
    rows: tuple[int, ...] | None = None
    for spec in find_operator(operator).tensors:
        if spec.name not in operands:
            continue
        shape, dims = tuple(operands[spec.name].shape), spec.dims
        fits = len(shape) >= len(dims)
        if fits and dims[0] == "T":
            leading, shape, dims = shape[: len(shape) - len(dims) + 1], shape[len(shape) - len(dims) + 1 :], dims[1:]
            fits = leading == rows if rows is not None else any_rows or len(leading) == 1
            rows = leading
        fits = fits and len(shape) == len(dims)
        for dim, size in zip(dims, shape, strict=False):
            if isinstance(dim, str) and symbols_of(dim) == (dim,):
                sizes.setdefault(dim, size)
            if all(symbol in sizes for symbol in symbols_of(dim)):
                fits = fits and evaluate(dim, sizes) == size
        if not fits:
            known = ", ".join(
                f"{symbol} = {sizes[symbol]}" for d in dims for symbol in symbols_of(d) if symbol in sizes
            )
            raise OperandError(f"{operator} {spec.name}", tuple(operands[spec.name].shape), f"{spec} with {known}")
