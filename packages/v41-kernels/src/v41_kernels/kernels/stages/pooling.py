"""Ratio-2 compression of one pair of tokens (model.md section 9)."""

from typing import Any

import pypto

from v41_kernels.kernels.stages.linear import product
from v41_kernels.kernels.stages.normalisation import normalise
from v41_kernels.kernels.stages.rows import vector_row

RING = 4
"""Tokens that a request's state remembers (the contract's STATE_CAPACITY)."""


def projected_row(x: Any, wkv: Any, wgate: Any, token: Any, D: int, width: int) -> tuple[Any, Any]:
    """FP32 `[1, width]` KV and gate of one token."""
    pypto.set_vec_tile_shapes(1, min(D, 512))
    row = pypto.view(x, [1, D], [token, 0])
    kv, gate = product(row, wkv), product(row, wgate)
    pypto.set_vec_tile_shapes(1, min(width, 512))
    return kv, gate


def pooled(even_kv: Any, even_gate: Any, odd_kv: Any, odd_gate: Any, norm: Any, width: int, eps: float) -> Any:
    """BF16 `[1, width]`: softmax over the two gates of each channel, rounded, then normed."""
    pypto.set_vec_tile_shapes(1, min(width, 512))
    highest = pypto.maximum(even_gate, odd_gate)
    even, odd = pypto.exp(even_gate - highest), pypto.exp(odd_gate - highest)
    total = even + odd
    mixed = even / total * even_kv + odd / total * odd_kv
    return normalise(pypto.cast(mixed, pypto.DT_BF16), vector_row(norm, width), width, eps)
