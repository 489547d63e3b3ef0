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


def write_latent(
    latent: Any, row: Any, x: Any, wkv: Any, wgate: Any, norm: Any, state: Any, block: Any, token: Any, position: Any,
    begins: Any, D: int, width: int, eps: float,
) -> None:  # fmt: skip
    """Writes the latent of the pair that `token` closes at `row`. Its first token is the one before, or, where the
    request `begins` with this one, the last that its ring in FP32 `state` `[slots, 2 * width]` remembers."""
    if pypto.cond(begins):
        kv, gate = projected_row(x, wkv, wgate, token, D, width)
        slot = block * RING + (position + RING - 1) % RING
        before_kv = pypto.view(state, [1, width], [slot, 0])
        before_gate = pypto.view(state, [1, width], [slot, width])
        pypto.assemble(pooled(before_kv, before_gate, kv, gate, norm, width, eps), [row, 0], latent)
    else:
        kv, gate = projected_row(x, wkv, wgate, token, D, width)
        before_kv, before_gate = projected_row(x, wkv, wgate, token - 1, D, width)
        pypto.assemble(pooled(before_kv, before_gate, kv, gate, norm, width, eps), [row, 0], latent)


def remember_last_tokens(
    state: Any, x: Any, wkv: Any, wgate: Any, starts: Any, positions: Any, table: Any, active: Any, D: int, width: int
) -> None:
    """Writes each request's last tokens of this step into its ring; a request whose block is -1 has none."""
    for request in pypto.loop(table.shape[0], name="REQUESTS", idx_name="request"):
        block = table[request, 0]
        stop = pypto.min(starts[request + 1], active)
        kept = pypto.max(pypto.min(stop - starts[request], RING), 0) * pypto.min(block + 1, 1)
        for back in pypto.loop(kept, name="KEPT", idx_name="back"):
            token = stop - kept + back
            slot = block * RING + positions[token] % RING
            kv, gate = projected_row(x, wkv, wgate, token, D, width)
            pypto.assemble(pypto.clone(kv), [slot, 0], state)
            pypto.assemble(pypto.clone(gate), [slot, width], state)
