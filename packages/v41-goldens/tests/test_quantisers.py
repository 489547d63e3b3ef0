"""The four quantisers against a scalar reference in rationals and IEEE FP32, element by element."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from v41_goldens import quantisers
from v41_goldens.errors import OperandError
from v41_goldens.judges import assert_equal_bits
from v41_goldens.quantisers import (
    Quantized,
    dequantize_activation,
    dequantize_compressed_kv,
    dequantize_index,
    dequantize_window_kv,
    quantize_activation,
    quantize_compressed_kv,
    quantize_index,
    quantize_window_kv,
)

NearestEven = Callable[[Fraction, Sequence[Fraction]], int]
F32 = np.float32

Quantiser = Callable[[Tensor], Quantized]
Dequantiser = Callable[[Quantized], Tensor]
QUANTISERS: list[tuple[Quantiser, Dequantiser]] = [
    (quantize_activation, dequantize_activation),
    (quantize_window_kv, dequantize_window_kv),
    (quantize_compressed_kv, dequantize_compressed_kv),
    (quantize_index, dequantize_index),
]
finite_bf16_bits = st.integers(0, 0xFFFF).filter(lambda bits: (bits >> 7) & 0xFF != 0xFF)
rows = st.lists(finite_bf16_bits, min_size=32, max_size=32)
near_rows = st.integers(90, 135).flatmap(  # exponents close to each other, so that codes are not mostly zero
    lambda exponent: st.lists(
        st.builds(
            lambda sign, step, mantissa: sign << 15 | (exponent - step) << 7 | mantissa,
            st.integers(0, 1),
            st.integers(0, 6),
            st.integers(0, 127),
        ),
        min_size=32,
        max_size=32,
    )
)


def bf16(bits: list[int]) -> Tensor:
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def pow2_ceil(value: np.float32) -> Fraction:
    power = Fraction(2) ** (math.frexp(float(value))[1] - 1)
    return power if power == Fraction(float(value)) else 2 * power


def signed(code: int, value: float, sign_bit: int) -> int:
    return code | (sign_bit if math.copysign(1.0, value) < 0 else 0)


def check_row(bits: list[int], e4m3_grid: list[Fraction], e2m1_grid: list[Fraction], nearest: NearestEven) -> None:
    x = bf16(bits)
    values = x.tolist()
    amax = F32(max(abs(value) for value in values))

    scale = pow2_ceil(max(amax, F32(1e-4)) * F32(1 / 448))
    codes = [signed(nearest(Fraction(abs(v)) / scale, e4m3_grid), v, 0x80) for v in values]
    fp8 = quantize_activation(x)
    assert fp8.payload.view(torch.uint8).tolist() == codes
    assert fp8.scale.view(torch.uint8).tolist() == [127 + round(math.log2(scale))]
    window = quantize_window_kv(x)
    assert_equal_bits(window.payload, fp8.payload, "window payload")
    assert_equal_bits(window.scale, fp8.scale, "window scale")

    scale = pow2_ceil(max(amax, F32(6 * 2.0**-126)) * F32(1 / 6))
    codes = [signed(nearest(Fraction(abs(v)) / scale, e2m1_grid), v, 8) for v in values]
    index = quantize_index(x)
    assert nibbles(index.payload) == codes
    assert index.scale.view(torch.uint8).tolist() == [127 + round(math.log2(scale))]

    compressed = quantize_compressed_kv(x)
    for group in range(2):
        part = values[16 * group : 16 * group + 16]
        largest = max(F32(max(abs(value) for value in part)), F32(6 * 2.0**-9))
        code = nearest(Fraction(float(largest / F32(6))), e4m3_grid)
        assert int(compressed.scale.view(torch.uint8)[group]) == code
        divisor = F32(float(e4m3_grid[code]))
        with np.errstate(over="ignore"):
            codes = [signed(nearest(Fraction(min(6.0, float(F32(abs(v)) / divisor))), e2m1_grid), v, 8) for v in part]
        assert nibbles(compressed.payload)[16 * group : 16 * group + 16] == codes


def nibbles(packed: Tensor) -> list[int]:
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten().tolist()


@settings(max_examples=60, deadline=None)
@given(st.one_of(rows, near_rows))
def test_codes_and_scales_of_any_row(
    e4m3_grid: list[Fraction], e2m1_grid: list[Fraction], nearest_even: NearestEven, bits: list[int]
) -> None:
    check_row(bits, e4m3_grid, e2m1_grid, nearest_even)


@pytest.mark.parametrize("top", [448.0, 6.0, 1.0, 2688.0, 1e-4, 6 * 2.0**-9])
@pytest.mark.parametrize("exponent", [-20, 0, 9])
@pytest.mark.parametrize("ulp", [-1, 0, 1])
def test_scales_beside_a_power_of_two(
    e4m3_grid: list[Fraction], e2m1_grid: list[Fraction], nearest_even: NearestEven, top: float, exponent: int, ulp: int
) -> None:
    """An amax on, just below and just above the value at which the scale doubles."""
    bits = int(torch.tensor(top * 2.0**exponent, dtype=torch.bfloat16).view(torch.int16)) + ulp
    row = [bits] + [(bits - 0x80 * (i % 5)) ^ (i << 15 & 0x8000) for i in range(1, 32)]
    check_row(row, e4m3_grid, e2m1_grid, nearest_even)


@pytest.mark.parametrize(("quantize", "top"), [(quantize_activation, 448.0), (quantize_index, 6.0)])
def test_every_scale_doubles_one_ulp_above_its_largest_amax(
    quantize: Callable[[Tensor], Quantized], top: float
) -> None:
    """`top * 2^k` still has the scale 2^k, for every k above the floor; the next BF16 number has 2^(k+1)."""
    k = torch.arange(-20 if quantize is quantize_activation else -126, 119)
    on = (top * 2.0 ** k.double()).bfloat16().view(torch.int16)
    rows = (on.unsqueeze(-1) + torch.tensor([-1, 0, 1], dtype=torch.int16)).view(torch.bfloat16)
    x = torch.zeros(*rows.shape, 32, dtype=torch.bfloat16)
    x[..., 7] = -rows
    codes = quantize(x).scale.view(torch.uint8).squeeze(-1).int()
    assert codes[1:].tolist() == (k.unsqueeze(-1) + torch.tensor([127, 127, 128]))[1:].tolist()
    assert codes[0, 1:].tolist() == [127 + int(k[0]), 128 + int(k[0])]


@pytest.mark.parametrize("beside", ["nothing", "the same", "anything smaller", "subnormals"])
def test_every_bf16_number_as_the_largest_of_an_activation_group(beside: str) -> None:
    """Scale and codes against the formula with its division, in FP32, for all 65536 bit patterns."""
    largest = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    generator = torch.Generator().manual_seed(8)
    x = torch.zeros(len(largest), 32, dtype=torch.bfloat16)
    if beside == "the same":
        x.copy_(largest.unsqueeze(1))
    elif beside == "anything smaller":
        x = (largest.nan_to_num().unsqueeze(1) * (2 * torch.rand(x.shape, generator=generator) - 1)).bfloat16()
    elif beside == "subnormals":
        x = torch.randint(0, 1 << 7, x.shape, generator=generator).to(torch.int16).view(torch.bfloat16)
    x[:, 21] = largest
    values = x.float()
    wanted = values.abs().amax(1).clamp_min(1e-4) * float(np.float32(1 / 448))
    mantissa, exponent = torch.frexp(wanted)  # 0.5 to 1, exclusively
    power = torch.where(mantissa == 0.5, exponent - 1, exponent)
    scale = torch.where(wanted.isfinite(), 2.0 ** power.double(), torch.nan).float()
    expected = (values / scale.unsqueeze(1)).clamp(-448, 448).to(torch.float8_e4m3fn)

    found = quantize_activation(x)
    finite = wanted.isfinite()
    assert finite.sum() == 2 * 0x7F80
    assert torch.equal(found.scale.view(torch.uint8).flatten()[finite].int(), power[finite] + 127)
    assert (found.scale.view(torch.uint8).flatten()[~finite] == 255).all()
    assert_equal_bits(found.payload.view(torch.uint8)[finite], expected.view(torch.uint8)[finite], "codes")
    assert found.payload.float()[~finite].isnan().all()


@pytest.mark.parametrize(("quantize", "dequantize"), QUANTISERS)
def test_dequantize_is_code_times_scale_exactly(
    quantize: Callable[[Tensor], Quantized], dequantize: Callable[[Quantized], Tensor]
) -> None:
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).mul_(3).to(torch.bfloat16)
    q = quantize(x)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    if q.payload.dtype == torch.uint8:
        codes = torch.stack((q.payload & 0xF, q.payload >> 4), dim=-1).flatten(-2).long()
        values = grid[codes & 7] * (1 - 2.0 * (codes >> 3))
    else:
        values = q.payload.to(torch.float64)
    product = (values.unflatten(-1, (q.scale.shape[-1], -1)) * q.scale.to(torch.float64).unsqueeze(-1)).flatten(-2)
    result = dequantize(q)
    assert result.dtype == (torch.float32 if dequantize is dequantize_activation else torch.bfloat16)
    assert torch.equal(result.to(torch.float64), product)


@pytest.mark.parametrize(("quantize", "dequantize"), QUANTISERS[1:])
def test_a_second_round_trip_changes_nothing(
    quantize: Callable[[Tensor], Quantized], dequantize: Callable[[Quantized], Tensor]
) -> None:
    """Caches hold packed rows; unpacking and packing again must be lossless where the group's top is a full code.

    Each group gets an element whose code is the largest, so that the scale is the same the second time.
    """
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(2)).clamp_(-0.9, 0.9).to(torch.bfloat16)
    x[:, ::16] = 448.0 / 512 if dequantize is dequantize_window_kv else 0.75
    once = dequantize(quantize(x))
    assert_equal_bits(dequantize(quantize(once)), once, "second round trip")


def test_rows_without_magnitude_have_the_floor_scale() -> None:
    x = torch.zeros(2, 32, dtype=torch.bfloat16)
    x[1] = -0.0
    fp8, index, compressed = quantize_activation(x), quantize_index(x), quantize_compressed_kv(x)
    assert fp8.scale.view(torch.uint8).tolist() == [[105], [105]]  # 1e-4 / 448 lies between 2^-23 and 2^-22
    assert index.scale.view(torch.uint8).tolist() == [[1], [1]]
    assert compressed.scale.view(torch.uint8).tolist() == [[1, 1], [1, 1]]  # 2^-9
    assert fp8.payload.view(torch.uint8).unique(dim=1).tolist() == [[0], [0x80]]
    assert index.payload.unique(dim=1).tolist() == [[0], [0x88]]
    for quantize, dequantize in QUANTISERS:
        assert_equal_bits(dequantize(quantize(x)).to(torch.bfloat16), x, "zeros keep their sign")


def test_the_floor_of_the_window_is_that_of_the_activation() -> None:
    """Below the floor small values lose bits; a quantiser without it, or with a floor after the division, would not."""
    x = torch.full((1, 32), 2.0**-18, dtype=torch.bfloat16)
    assert quantize_window_kv(x).scale.view(torch.uint8).tolist() == [[105]]
    assert quantize_window_kv(x).payload.view(torch.uint8).unique().tolist() == [0x58]  # 2^-18 / 2^-22 = 16


@pytest.mark.parametrize(("quantize", "dequantize"), QUANTISERS)
@pytest.mark.parametrize("poison", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_group_with_something_not_finite_is_nan_and_no_other(
    quantize: Callable[[Tensor], Quantized], dequantize: Callable[[Quantized], Tensor], poison: float
) -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    clean = dequantize(quantize(x))
    x[1, 40] = poison
    result = dequantize(quantize(x))
    group = 16 if quantize is quantize_compressed_kv else 32
    start = 40 // group * group
    assert result[1, start : start + group].isnan().all()
    result[1, start : start + group] = clean[1, start : start + group]
    assert_equal_bits(result, clean, "other groups")


@pytest.mark.parametrize(("quantize", "dequantize"), QUANTISERS)
def test_shapes_strides_and_single_rows(
    quantize: Callable[[Tensor], Quantized], dequantize: Callable[[Quantized], Tensor]
) -> None:
    x = torch.randn(5, 3, 512, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    before = x.clone()
    whole = dequantize(quantize(x))
    assert_equal_bits(x, before, "input")
    assert_equal_bits(dequantize(quantize(x.transpose(0, 1))), whole.transpose(0, 1).contiguous(), "transposed")
    assert_equal_bits(dequantize(quantize(x[..., 64:128])), whole[..., 64:128].contiguous(), "slice")
    assert_equal_bits(dequantize(quantize(x[4, 2])), whole[4, 2], "one row")
    assert dequantize(quantize(x[:0])).shape == (0, 3, 512)


@pytest.mark.parametrize("elements", [1, 500, 64 * 32 * 3])
def test_rows_quantised_in_chunks_are_the_same(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    x[20, 1, 3] = math.nan
    whole = quantize_activation(x)
    monkeypatch.setattr(quantisers, "_CHUNK_ELEMENTS", elements)
    for found, expected in zip(quantize_activation(x), whole, strict=True):
        assert found.shape == expected.shape
        assert_equal_bits(found.view(torch.uint8), expected.view(torch.uint8), "chunks")
    assert quantize_activation(x[:0]).scale.shape == (0, 3, 2)


def test_bad_operands_are_refused() -> None:
    for quantize, _ in QUANTISERS:
        with pytest.raises(OperandError, match=r"torch\.bfloat16"):
            quantize(torch.zeros(2, 32))
        with pytest.raises(OperandError, match="multiple of"):
            quantize(torch.zeros(2, 24, dtype=torch.bfloat16))
        with pytest.raises(OperandError, match=r"multiple of .*, found \(\)"):
            quantize(torch.tensor(1.0, dtype=torch.bfloat16))


@pytest.mark.parametrize(("quantize", "dequantize"), QUANTISERS)
def test_rows_that_want_gradients_and_rows_without_columns(quantize: Quantiser, dequantize: Dequantiser) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)
    wanting = dequantize(quantize(x.clone().requires_grad_()))
    assert_equal_bits(wanting.detach(), dequantize(quantize(x)), "gradients")
    assert dequantize(quantize(x[:, :0])).shape == (4, 0)
