"""Functions of FP32 tiles that keep the valid rows of a ragged tile, which the compiler's own `sigmoid` loses."""

from typing import Any

import pypto


def sigmoid(x: Any) -> Any:
    """FP32 `1 / (1 + exp(-x))`."""
    return pypto.reciprocal(pypto.exp(x * (-1.0)) + 1.0)


def softplus(x: Any) -> Any:
    """FP32 `log(1 + exp(x))`, which keeps its value far below zero and does not overflow above."""
    return pypto.log1p(pypto.exp(pypto.abs(x) * (-1.0))) + pypto.relu(x)


def swiglu(gate: Any, up: Any, limit: float) -> Any:
    """FP32 `silu(min(gate, limit)) * clamp(up, -limit, limit)` of FP32 tiles (model.md section 14.2)."""
    bounded = pypto.minimum(gate, limit)
    return bounded * sigmoid(bounded) * pypto.maximum(pypto.minimum(up, limit), -limit)
