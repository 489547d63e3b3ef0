"""Linears against exact rationals, and at the sizes of the release."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from v41_config import FLASH
from v41_goldens import exact, linear
from v41_goldens.errors import OperandError
from v41_goldens.judges import assert_equal_bits, unequal_bits
from v41_goldens.linear import (
    bf16_linear,
    dequantized_linear,
    exchanged_linears,
    fp32_linear,
    quantized_linear,
    quantized_linear_fp32,
)
from v41_goldens.quantisers import dequantize_activation, quantize_activation
from v41_goldens.quantized_weights import Fp4Weight, Fp8Weight

Weight = Fp8Weight | Fp4Weight


def random_x(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def fp8(seed: int, n: int, k: int) -> Fp8Weight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(n, k, generator=generator).mul_(60).clamp_(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.randint(112, 116, (n // 32, k // 32), generator=generator, dtype=torch.uint8)
    return Fp8Weight(codes, scale.view(torch.float8_e8m0fnu))


def fp4(seed: int, n: int, k: int) -> Fp4Weight:
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(-128, 128, (n, k // 2), generator=generator, dtype=torch.int8)
    scale = torch.randint(117, 121, (n, k // 32), generator=generator, dtype=torch.uint8)
    return Fp4Weight(packed, scale.view(torch.float8_e8m0fnu))


KINDS: list[Callable[[int, int, int], Weight]] = [fp8, fp4]


def rational_dot(x: Tensor, w: Tensor) -> Tensor:
    rows, columns = ([[Fraction(v) for v in row] for row in m.double().tolist()] for m in (x, w))
    dots = [[float(sum(a * b for a, b in zip(r, c, strict=True))) for c in columns] for r in rows]
    return torch.tensor(dots, dtype=torch.float64).float()


@pytest.mark.parametrize("make", KINDS)
def test_quantised_linear_is_the_exact_product_of_the_dequantised_operands(
    make: Callable[[int, int, int], Weight],
) -> None:
    x, w = random_x(0, 5, 96), make(1, 64, 96)
    expected = rational_dot(dequantize_activation(quantize_activation(x)), w.dequantize())
    assert_equal_bits(quantized_linear_fp32(x, w), expected, "FP32")
    assert_equal_bits(quantized_linear(x, w), expected.bfloat16(), "BF16")
    assert unequal_bits(exact.dot(x, w.dequantize()), expected).any()  # the activation is quantised


def test_full_precision_linears() -> None:
    x, w = random_x(2, 4, 80), random_x(3, 7, 80)
    expected = rational_dot(x, w)
    assert_equal_bits(fp32_linear(x, w), expected, "FP32")
    assert_equal_bits(bf16_linear(x, w), expected.bfloat16(), "BF16")
    assert fp32_linear(x.view(2, 2, 80), w).shape == (2, 2, 7)


def test_partials_over_the_inputs_add_up() -> None:
    """Tensor-parallel ranks hold 32-column blocks of wo_b: their quantisation groups are those of the whole row."""
    x, w = random_x(4, 6, 128), fp8(5, 64, 128)
    parts = [
        quantized_linear_fp32(
            x[:, columns].contiguous(),
            Fp8Weight(w.codes[:, columns].contiguous(), w.scale[:, columns.start // 32 : columns.stop // 32]),
        )
        for columns in (slice(0, 64), slice(64, 128))
    ]
    torch.testing.assert_close(parts[0] + parts[1], quantized_linear_fp32(x, w), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("make", KINDS)
def test_output_rows_can_be_sharded(make: Callable[[int, int, int], Weight]) -> None:
    x, w = random_x(6, 3, 256), make(7, 128, 256)
    parts = [quantized_linear(x, w.rows(start, start + 32)) for start in range(0, 128, 32)]
    assert_equal_bits(torch.cat(parts, dim=-1), quantized_linear(x, w), "shards")


@pytest.mark.parametrize(
    ("make", "n", "k"),
    [
        pytest.param(fp8, FLASH.num_attention_heads * FLASH.head_dim, FLASH.q_lora_rank, id="wq_b"),
        pytest.param(fp8, FLASH.hidden_size, FLASH.o_groups * FLASH.o_lora_rank, id="wo_b"),
        pytest.param(fp4, FLASH.moe_intermediate_size, FLASH.hidden_size, id="expert w1"),
        pytest.param(fp4, FLASH.hidden_size, FLASH.moe_intermediate_size, id="expert w2"),
    ],
)
def test_flash_dimensions(make: Callable[[int, int, int], Weight], n: int, k: int) -> None:
    x, w = random_x(8, 3, k), make(9, n, k)
    y = quantized_linear_fp32(x, w)
    assert y.shape == (3, n)
    rows = torch.tensor([0, n // 2 + 1, n - 1])
    block = [w.rows(int(r) // 32 * 32, int(r) // 32 * 32 + 32).dequantize()[int(r) % 32] for r in rows]
    expected = rational_dot(dequantize_activation(quantize_activation(x[:1])), torch.stack(block))
    assert_equal_bits(y[:1, rows], expected, "three outputs")
    assert_equal_bits(quantized_linear_fp32(x[1:2], w), y[1:2], "one row alone")


def test_nothing_zero_and_nan() -> None:
    w = fp8(10, 32, 64)
    assert quantized_linear(torch.empty(0, 64, dtype=torch.bfloat16), w).shape == (0, 32)
    assert_equal_bits(
        quantized_linear(torch.zeros(2, 64, dtype=torch.bfloat16), w), torch.zeros(2, 32, dtype=torch.bfloat16), "zero"
    )
    x = random_x(11, 3, 64)
    clean = quantized_linear(x, w)
    x[1, 40] = float("nan")
    result = quantized_linear(x, w)
    assert result[1].isnan().all()
    assert_equal_bits(result[[0, 2]], clean[[0, 2]], "other rows")


def test_fp32_activations_are_refused() -> None:
    with pytest.raises(OperandError, match="bfloat16"):
        quantized_linear(torch.zeros(2, 64), fp8(12, 32, 64))


def test_a_linear_is_exchanged_for_a_while_and_no_other_with_it() -> None:
    x, w, matrix = random_x(13, 3, 64), fp8(14, 32, 64), random_x(15, 32, 64)
    linears: dict[str, Any] = {
        "quantized_linear": w,
        "quantized_linear_fp32": w,
        "bf16_linear": matrix,
        "fp32_linear": matrix,
    }

    def results() -> dict[str, Tensor]:
        return {name: getattr(linear, name)(x, operand) for name, operand in linears.items()}

    goldens = results()
    for name, operand in linears.items():

        def other(rows: Tensor, weight: object, name: str = name, operand: object = operand) -> Tensor:
            assert rows is x
            assert weight is operand
            return goldens[name] + 1

        with exchanged_linears({name: other}):
            found = results()
            with exchanged_linears({}):
                assert_equal_bits(results()[name], goldens[name], "the goldens inside")
        for kind, golden in goldens.items():
            assert_equal_bits(found[kind], golden + 1 if kind == name else golden, f"{kind} without {name}")
    assert_equal_bits(results()["bf16_linear"], goldens["bf16_linear"], "afterwards")


@pytest.mark.parametrize("make", KINDS)
def test_rows_that_are_quantised_go_through_what_takes_the_place_of_the_quantised_linear(
    make: Callable[[int, int, int], Weight],
) -> None:
    """Quantised again they are the same rows, whatever their size."""
    sizes = torch.tensor([1.0, 3e4, 1e-6, 0.0]).unsqueeze(-1)
    rows, w = dequantize_activation(quantize_activation((random_x(16, 4, 96) * sizes).bfloat16())), make(17, 64, 96)
    golden = dequantized_linear(rows, w).bfloat16()

    def again(x: Tensor, weight: Weight) -> Tensor:
        with exchanged_linears({}):
            return quantized_linear(x, weight)

    with exchanged_linears({"quantized_linear": again}):
        assert_equal_bits(dequantized_linear(rows, w).bfloat16(), golden, "quantised twice")
    with exchanged_linears({"quantized_linear": lambda x, weight: again(x, weight) * 2}):
        assert_equal_bits(dequantized_linear(rows, w).bfloat16(), golden * 2, "another one's result")
