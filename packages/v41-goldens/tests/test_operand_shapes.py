"""Operands of shapes that Torch would broadcast are refused, by the dimensions of the operator's contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from v41_config import TINY
from v41_goldens.errors import OperandError
from v41_goldens.experts import routed_experts
from v41_goldens.gate import gate
from v41_goldens.hyper_connections import mhc_mixes, mhc_post, mhc_pre
from v41_goldens.linear import bf16_linear, fp32_linear
from v41_goldens.moe import combine
from v41_goldens.rms_norm import rms_norm
from v41_goldens.weights import HyperConnectionWeights

T, D, HC, E, K = 5, TINY.hidden_size, TINY.hc_mult, TINY.n_routed_experts, TINY.num_experts_per_tok


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def ids(*shape: int) -> Tensor:
    return torch.full(shape, -1)


CALLS: dict[str, tuple[Callable[..., object], list[Tensor]]] = {
    "rms_norm": (lambda x, w: rms_norm(x, w, 1e-20), [bf16(T, D), bf16(D)]),
    "mhc_mixes": (
        lambda x, fn, base, scale: mhc_mixes(x, HyperConnectionWeights(fn, base, scale), TINY),
        [bf16(T, HC, D), torch.zeros(TINY.hc_mixes, TINY.hc_dim), torch.zeros(TINY.hc_mixes), torch.zeros(3)],
    ),
    "mhc_pre": (mhc_pre, [bf16(T, HC, D), torch.zeros(T, HC)]),
    "mhc_post": (mhc_post, [bf16(T, D), bf16(T, HC, D), torch.zeros(T, HC), torch.zeros(T, HC, HC)]),
    "gate": (lambda x, w, b: gate(x, w, b, TINY), [bf16(T, D), bf16(E, D), torch.zeros(E)]),
    "routed_experts": (lambda x, i, w: routed_experts(x, i, w, {}, TINY), [bf16(T, D), ids(T), torch.zeros(T)]),
    "combine": (combine, [bf16(T, K, D), ids(T, K), bf16(T, D)]),
    "fp32_linear": (fp32_linear, [bf16(T, D), bf16(E, D)]),
    "bf16_linear": (bf16_linear, [bf16(T, D), bf16(E, D)]),
}
FREE = {("rms_norm", 0, 0), ("mhc_mixes", 0, 0), ("gate", 0, 0), ("mhc_pre", 0, 2), ("routed_experts", 0, 1),
        ("fp32_linear", 0, 0), ("fp32_linear", 1, 0), ("bf16_linear", 0, 0), ("bf16_linear", 1, 0)}  # fmt: skip
"""Operator, operand and axis of sizes that no other operand has."""

BROKEN = [
    (name, operand, axis, size)
    for name, (_, operands) in CALLS.items()
    for operand, tensor in enumerate(operands)
    for axis in range(tensor.dim())
    if (name, operand, axis) not in FREE
    for size in (1, tensor.shape[axis] + 1)
]


@pytest.mark.parametrize(("name", "operand", "axis", "size"), BROKEN)
def test_a_size_that_does_not_fit_is_refused(name: str, operand: int, axis: int, size: int) -> None:
    call, operands = CALLS[name]
    call(*operands)
    shape = list(operands[operand].shape)
    shape[axis] = size
    wrong = torch.zeros(shape, dtype=operands[operand].dtype)
    with pytest.raises(OperandError, match=f"^{name} "):
        call(*operands[:operand], wrong, *operands[operand + 1 :])


@pytest.mark.parametrize("name", CALLS)
def test_another_rank_is_refused(name: str) -> None:
    call, operands = CALLS[name]
    for operand, tensor in enumerate(operands[1:], 1):
        with pytest.raises(OperandError, match=f"^{name} "):
            call(*operands[:operand], tensor.unsqueeze(-1), *operands[operand + 1 :])


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"rms_norm", "fp32_linear", "bf16_linear"}))
@pytest.mark.parametrize("shape", [(5, 1), (1, 5), ()])
def test_rows_of_several_dimensions_are_refused_where_there_is_a_dimension_behind_them(
    name: str, shape: tuple[int, ...]
) -> None:
    """The sum over streams or experts would run over rows."""
    call, operands = CALLS[name]
    with pytest.raises(OperandError, match=f"^{name} "):
        call(*(t.new_zeros((*shape, *t.shape[1:])) if t.shape[0] == T else t for t in operands))


def test_rows_may_have_several_dimensions() -> None:
    assert rms_norm(bf16(2, 3, D), bf16(D), 1e-20).shape == (2, 3, D)
    assert fp32_linear(bf16(2, 3, D), bf16(E, D)).shape == (2, 3, E)
    with pytest.raises(OperandError, match=r"rms_norm weight: expected bfloat16 \[D\] with D = 256, found \(255,\)"):
        rms_norm(bf16(2, 3, D), bf16(D - 1), 1e-20)
