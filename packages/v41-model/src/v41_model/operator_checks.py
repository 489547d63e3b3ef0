"""What rank code takes from an operator, whoever provides it: an output of another form is one error with its name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from v41_config import OperatorError

__all__ = ["checked"]


def checked(operator: str, output: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``output``, if it is a tensor of this shape and dtype.

    Errors: :class:`v41_config.OperatorError` naming the operator.
    """
    if not isinstance(output, Tensor):
        raise OperatorError(operator, type(output).__name__, f"a tensor {list(shape)} {dtype}")
    if output.dtype != dtype or tuple(output.shape) != tuple(shape):
        raise OperatorError(operator, f"{list(output.shape)} {output.dtype}", f"{list(shape)} {dtype}")
    return output
