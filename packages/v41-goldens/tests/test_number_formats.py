"""E4M3, E8M0 and E2M1 against their definitions in exact rationals: every code, every midpoint, random values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from v41_goldens import number_formats
from v41_goldens.errors import OperandError
from v41_goldens.judges import assert_equal_bits
from v41_goldens.number_formats import (
    e2m1_decode,
    e2m1_encode,
    e2m1_rows,
    e2m1_times_e8m0,
    e4m3_decode,
    e4m3_encode,
    e8m0_decode,
    pow2_ceil_e8m0,
)
from v41_goldens.quantisers import Quantized, dequantize_compressed_kv

NearestEven = Callable[[Fraction, Sequence[Fraction]], int]
ALL_BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
finite_fp32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def around_midpoints(grid: Sequence[Fraction]) -> Tensor:
    """Every grid value and midpoint with its FP32 neighbours, both signs: where a rounding rule shows."""
    points = [float(value) for value in grid] + [float((a + b) / 2) for a, b in itertools.pairwise(grid)]
    exact = torch.tensor(points, dtype=torch.float32)
    near = [torch.nextafter(exact, torch.tensor(limit)) for limit in (-math.inf, math.inf)]
    values = torch.cat([exact, *near])
    return torch.cat([values, -values])


def rounded(x: Tensor, grid: Sequence[Fraction], sign_bit: int, nearest_even: NearestEven) -> list[int]:
    return [
        nearest_even(Fraction(abs(value)), grid) | (sign_bit if math.copysign(1.0, value) < 0 else 0)
        for value in x.tolist()
    ]


def nibbles(packed: Tensor) -> list[int]:
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten().tolist()


def test_e4m3_decodes_every_code(e4m3_grid: list[Fraction]) -> None:
    decoded = e4m3_decode(ALL_BYTES)
    magnitudes = torch.tensor([float(value) for value in e4m3_grid])
    assert_equal_bits(decoded[:127], magnitudes, "positive codes")
    assert_equal_bits(decoded[128:255], -magnitudes, "negative codes")
    assert decoded[[127, 255]].isnan().all()
    # Without a NaN in the tensor another path decodes.
    numbers = torch.cat([ALL_BYTES[:127], ALL_BYTES[128:255]])
    assert_equal_bits(e4m3_decode(numbers), torch.cat([magnitudes, -magnitudes]), "numbers only")
    assert_equal_bits(e4m3_decode(numbers.view(torch.float8_e4m3fn)), e4m3_decode(numbers), "float8")


def test_e4m3_nan_is_never_a_number() -> None:
    for byte in (0x7F, 0xFF):
        codes = torch.zeros(3, 70, dtype=torch.uint8)
        codes[1, 69] = byte
        assert e4m3_decode(codes).isnan().nonzero().tolist() == [[1, 69]]


def test_e4m3_encodes_to_nearest_even(e4m3_grid: list[Fraction], nearest_even: NearestEven) -> None:
    x = around_midpoints(e4m3_grid)
    assert e4m3_encode(x).view(torch.uint8).tolist() == rounded(x, e4m3_grid, 0x80, nearest_even)


@settings(deadline=None)
@given(st.lists(finite_fp32, min_size=1, max_size=8))
def test_e4m3_encodes_any_number(e4m3_grid: list[Fraction], nearest_even: NearestEven, values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    assert e4m3_encode(x).view(torch.uint8).tolist() == rounded(x, e4m3_grid, 0x80, nearest_even)


def test_e4m3_clamps_infinities_and_keeps_nan() -> None:
    x = torch.tensor([math.inf, -math.inf, 449.0, 1e6, -0.0])
    assert e4m3_encode(x).view(torch.uint8).tolist() == [0x7E, 0xFE, 0x7E, 0x7E, 0x80]
    assert e4m3_decode(e4m3_encode(torch.tensor([math.nan, -math.nan]))).isnan().all()


def test_e8m0_decodes_every_code() -> None:
    decoded = e8m0_decode(ALL_BYTES)
    assert decoded[:255].tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert decoded[255].isnan()
    assert_equal_bits(e8m0_decode(ALL_BYTES[:255].view(torch.float8_e8m0fnu)), decoded[:255], "float8")


@settings(deadline=None)
@given(st.floats(min_value=2.0**-126, max_value=2.0**127, width=32))
def test_pow2_ceil_is_the_smallest_power_at_or_above(value: float) -> None:
    code = int(pow2_ceil_e8m0(torch.tensor(value)))
    assert Fraction(2) ** (code - 127) >= Fraction(value) > Fraction(2) ** (code - 128)


def test_pow2_ceil_at_the_edges() -> None:
    exact = torch.tensor([2.0**k for k in range(-126, 128)])
    assert pow2_ceil_e8m0(exact).tolist() == list(range(1, 255))
    above = torch.nextafter(exact[:-1], torch.tensor(math.inf))
    assert pow2_ceil_e8m0(above).tolist() == list(range(2, 255))
    below = torch.nextafter(exact[1:], torch.tensor(0.0))
    assert pow2_ceil_e8m0(below).tolist() == list(range(2, 255))
    # Zero, subnormals, values beyond the largest code, and what is no number.
    special = torch.tensor([0.0, 1e-45, 2.0**-127, 1.5 * 2.0**127, 3.4e38, math.inf, math.nan, -math.nan])
    assert pow2_ceil_e8m0(special).tolist() == [0, 1, 1, 254, 254, 255, 255, 255]


def test_pow2_ceil_of_a_transposed_tensor() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 9.0]])
    assert pow2_ceil_e8m0(x.T).tolist() == [[127, 129], [128, 130], [129, 131]]


def test_e2m1_decodes_every_byte(e2m1_grid: list[Fraction]) -> None:
    values = torch.tensor([float(value) for value in e2m1_grid])
    values = torch.cat([values, -values])
    byte = torch.arange(256)
    expected = torch.stack((values[byte & 15], values[byte >> 4]), dim=-1)
    assert_equal_bits(e2m1_decode(ALL_BYTES.unsqueeze(-1)), expected, "bytes")
    assert_equal_bits(e2m1_decode(ALL_BYTES.view(torch.int8).view(16, 16)), expected.view(16, 32), "int8 matrix")
    assert_equal_bits(e2m1_decode(ALL_BYTES.view(16, 16).T), expected.view(16, 16, 2).transpose(0, 1).flatten(1), "T")


def test_e2m1_encodes_to_nearest_even(e2m1_grid: list[Fraction], nearest_even: NearestEven) -> None:
    x = around_midpoints(e2m1_grid)
    assert nibbles(e2m1_encode(x)) == rounded(x, e2m1_grid, 8, nearest_even)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0])
    assert e2m1_decode(e2m1_encode(ties)).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -4.0]


@settings(deadline=None)
@given(
    st.lists(st.one_of(finite_fp32, st.floats(-8, 8, width=32)), min_size=2, max_size=16).filter(
        lambda v: len(v) % 2 == 0
    )
)
def test_e2m1_encodes_any_number(e2m1_grid: list[Fraction], nearest_even: NearestEven, values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    assert nibbles(e2m1_encode(x)) == rounded(x, e2m1_grid, 8, nearest_even)


def test_e2m1_round_trips_every_byte_and_saturates() -> None:
    assert_equal_bits(e2m1_encode(e2m1_decode(ALL_BYTES.unsqueeze(-1))), ALL_BYTES.unsqueeze(-1), "round trip")
    x = torch.tensor([math.inf, -math.inf, 1e30, -7.0, math.nan, -0.0])
    assert nibbles(e2m1_encode(x))[:4] == [7, 15, 7, 15]
    assert nibbles(e2m1_encode(x))[4] & 7 == 0  # E2M1 has no NaN; the quantisers carry it in the scale
    assert nibbles(e2m1_encode(x))[5] == 8


def test_encoding_leaves_its_input_alone() -> None:
    x = torch.tensor([[7.0, -0.3], [500.0, 2.5]])
    before = x.clone()
    e2m1_encode(x)
    e4m3_encode(x)
    pow2_ceil_e8m0(x)
    assert_equal_bits(x, before, "input")


def test_empty_tensors() -> None:
    assert e4m3_decode(torch.empty(0, 32, dtype=torch.uint8)).shape == (0, 32)
    assert e2m1_decode(torch.empty(0, 16, dtype=torch.uint8)).shape == (0, 32)
    assert e2m1_encode(torch.empty(0, 32)).shape == (0, 16)


# Against ml_dtypes, an implementation of the formats that shares nothing with this one


def bits_of(values: Tensor) -> list[int]:
    """FP32 bits, every NaN as one."""
    return torch.where(values.isnan(), torch.nan, values).view(torch.int32).tolist()


def in_ml_dtypes(codes: Tensor, name: str) -> Tensor:
    """FP32 values of byte codes."""
    return torch.from_numpy(codes.numpy().view(getattr(ml_dtypes, name)).astype(np.float32))


def test_every_code_means_the_same_in_ml_dtypes() -> None:
    assert bits_of(e4m3_decode(ALL_BYTES)) == bits_of(in_ml_dtypes(ALL_BYTES, "float8_e4m3fn"))
    assert bits_of(e8m0_decode(ALL_BYTES)) == bits_of(in_ml_dtypes(ALL_BYTES, "float8_e8m0fnu"))
    nibble = torch.stack((ALL_BYTES & 0xF, ALL_BYTES >> 4), dim=-1)
    assert bits_of(e2m1_decode(ALL_BYTES.unsqueeze(-1))) == bits_of(in_ml_dtypes(nibble, "float4_e2m1fn"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_pair_of_bytes_is_looked_up_right(dtype: torch.dtype) -> None:
    """All 65,536 entries of the table, from any place in memory: at an odd one, in odd numbers, in a column."""
    pair = torch.arange(1 << 16)
    packed = torch.stack((pair & 0xFF, pair >> 8), dim=-1).to(torch.uint8)
    nibble = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)
    expected = in_ml_dtypes(nibble, "float4_e2m1fn").to(dtype)
    assert_equal_bits(e2m1_decode(packed, dtype), expected, "pairs")
    flat = torch.cat([torch.zeros(1, dtype=torch.uint8), packed.flatten()])
    assert_equal_bits(e2m1_decode(flat[1:], dtype), expected.flatten(), "odd place")
    assert_equal_bits(e2m1_decode(flat[1:-1], dtype), expected.flatten()[:-2], "odd number")
    assert_equal_bits(e2m1_decode(packed.T, dtype)[1], expected[:, 2:].flatten(), "column")


def test_every_product_of_a_pair_and_a_scale_is_that_of_ml_dtypes() -> None:
    """All 65,536 products of an FP4 pair and an E4M3 scale of the compressed KV, exact in BF16."""
    packed, scale = (codes.flatten() for codes in torch.meshgrid(ALL_BYTES, ALL_BYTES, indexing="ij"))
    rows = packed.unsqueeze(-1).repeat(1, 8)
    found = dequantize_compressed_kv(Quantized(rows, scale.unsqueeze(-1).view(torch.float8_e4m3fn)))
    nibble = torch.stack((packed & 0xF, packed >> 4), dim=-1)
    expected = in_ml_dtypes(nibble, "float4_e2m1fn").double() * in_ml_dtypes(scale, "float8_e4m3fn").double()[:, None]
    assert bits_of(found.float()) == bits_of(expected.float().repeat(1, 8))
    assert torch.equal(found.double().nan_to_num(), expected.repeat(1, 8).nan_to_num()), "no rounding"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_product_of_an_fp4_code_and_a_weight_scale_is_that_of_ml_dtypes(dtype: torch.dtype) -> None:
    """All 65,536 products of a byte and an E8M0 scale: with scales that exponents can be added for, and with others.

    Together they take the general way, scale by scale those in range take the other.
    """
    packed = ALL_BYTES.view(1, 16, 16).repeat(256, 1, 1)
    scale = ALL_BYTES.view(256, 1, 1).repeat(1, 16, 1).view(torch.float8_e8m0fnu)
    nibble = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(2)
    products = in_ml_dtypes(nibble, "float4_e2m1fn").double() * in_ml_dtypes(scale.view(torch.uint8), "float8_e8m0fnu")
    expected = products.to(torch.float32).to(dtype)
    assert bits_of(e2m1_times_e8m0(packed, scale, dtype)) == bits_of(expected)
    alone = [e2m1_times_e8m0(bytes_, own, dtype) for bytes_, own in zip(packed, scale, strict=True)]
    assert bits_of(torch.stack(alone)) == bits_of(expected)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_rows_decoded_in_chunks_are_the_same(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = torch.randint(0, 256, (7, 5, 33), dtype=torch.uint8)[..., 1:]  # an odd place in memory
    scale = torch.randint(100, 140, (7, 5, 2), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    whole = e2m1_times_e8m0(packed, scale)
    monkeypatch.setattr(number_formats, "_CHUNK_ELEMENTS", 64 * rows)
    assert_equal_bits(e2m1_times_e8m0(packed, scale), whole, "chunks")
    groups = e2m1_decode(packed).unflatten(-1, (2, 32))
    assert_equal_bits(whole, (groups * e8m0_decode(scale).unsqueeze(-1)).flatten(-2), "product")


@settings(deadline=None)
@given(st.lists(st.one_of(finite_fp32, st.floats(-600, 600, width=32)), min_size=2, max_size=64))
def test_encoding_rounds_as_ml_dtypes(values: list[float]) -> None:
    """ml_dtypes does not saturate, so both get what is in range."""
    x = torch.tensor(values[: len(values) // 2 * 2], dtype=torch.float32)
    fp8, fp4 = (x.clamp(-largest, largest).numpy() for largest in (448, 6))
    assert e4m3_encode(x).view(torch.uint8).tolist() == fp8.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).tolist()
    assert nibbles(e2m1_encode(x)) == fp4.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).tolist()


def test_codes_around_every_value_and_midpoint_are_those_of_ml_dtypes(
    e4m3_grid: list[Fraction], e2m1_grid: list[Fraction]
) -> None:
    """Signed zeros, subnormals, ties, +-448 and +-6, each with its neighbours."""
    for grid, encode, name in (
        (e4m3_grid, lambda x: e4m3_encode(x).view(torch.uint8).tolist(), "float8_e4m3fn"),
        (e2m1_grid, lambda x: nibbles(e2m1_encode(x)), "float4_e2m1fn"),
    ):
        x = around_midpoints(grid)
        largest = float(grid[-1])
        expected = x.clamp(-largest, largest).numpy().astype(getattr(ml_dtypes, name)).view(np.uint8)
        assert encode(x) == expected.tolist()


def test_ties_toward_zero_would_be_noticed(e2m1_grid: list[Fraction], nearest_even: NearestEven) -> None:
    """The comparison above rejects the rule of a nearest-value search, which sends ties to the lower code."""

    def toward_zero(x: Tensor) -> list[int]:
        grid = np.array([float(value) for value in e2m1_grid])
        lower = [int(np.abs(grid - abs(value)).argmin()) for value in x.tolist()]
        return [code | (8 if math.copysign(1.0, v) < 0 else 0) for code, v in zip(lower, x.tolist(), strict=True)]

    x = around_midpoints(e2m1_grid)
    assert toward_zero(x) != rounded(x, e2m1_grid, 8, nearest_even)


def test_other_dtypes_are_refused() -> None:
    for decode in (e4m3_decode, e8m0_decode, e2m1_decode):
        with pytest.raises(OperandError, match=r"int32"):
            decode(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(OperandError, match="even last dimension"):
        e2m1_encode(torch.zeros(2, 3))
    for encode in (e4m3_encode, pow2_ceil_e8m0, e2m1_encode):
        for dtype in (torch.float64, torch.bfloat16, torch.int32):
            with pytest.raises(OperandError, match=r"expected torch\.float32"):
                encode(torch.zeros(2, 4, dtype=dtype))


@pytest.mark.parametrize(
    ("packed", "scale"),
    [((6, 32), (12, 2)), ((6, 32), (1, 2)), ((6, 32), (2, 3, 2)), ((6, 32), (6, 5)), ((6, 1), (6, 4)),
     ((6, 32), (6, 0)), ((), ()), ((32,), ()), ((), (2,))],
)  # fmt: skip
def test_scales_that_do_not_belong_to_their_codes_are_refused(packed: tuple[int, ...], scale: tuple[int, ...]) -> None:
    codes, scales = torch.zeros(packed, dtype=torch.uint8), torch.full(scale, 127, dtype=torch.uint8)
    with pytest.raises(OperandError, match="packed, scale"):
        e2m1_times_e8m0(codes, scales.view(torch.float8_e8m0fnu))


def test_a_product_in_another_dtype_is_refused() -> None:
    codes, scales = torch.zeros(2, 32, dtype=torch.uint8), torch.full((2, 2), 127, dtype=torch.uint8)
    for dtype in (torch.float16, torch.float64, torch.int32):
        with pytest.raises(OperandError, match="e2m1_times_e8m0 dtype"):
            e2m1_times_e8m0(codes, scales, dtype)


@pytest.mark.parametrize("scale", [2, 252, 253])
def test_one_row_of_odd_stride_and_no_row_are_decoded(scale: int) -> None:
    """A view counts as contiguous whatever the stride of a dimension of one row, or of none."""
    row = ALL_BYTES[:33].view(1, 33)[:, :32]
    scales = torch.full((1, 1), scale, dtype=torch.uint8)
    assert_equal_bits(e2m1_times_e8m0(row, scales), e2m1_times_e8m0(row.clone(), scales), "odd stride")
    assert_equal_bits(e2m1_decode(row), e2m1_decode(row.flatten()).unsqueeze(0), "odd stride, decoded")
    assert e2m1_times_e8m0(row[:, :0], scales[:, :0]).shape == (1, 0)
    assert e2m1_times_e8m0(row[:0], scales[:0]).shape == (0, 64)
    assert e2m1_times_e8m0(row[:, :0], scales).shape == (1, 0)
    for rows in (slice(0, 0), slice(1, 1), slice(5, 9)):
        assert e2m1_rows(row, scales)(rows).shape == (0, 64)


@settings(deadline=None)
@given(
    rows=st.integers(0, 4),
    groups=st.integers(0, 3),
    half=st.integers(1, 20),
    offset=st.integers(0, 3),
    pool=st.lists(st.sampled_from([0, 1, 2, 3, 127, 251, 252, 253, 254, 255]), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_products_of_any_shape_place_and_scale_are_those_of_float64(
    rows: int, groups: int, half: int, offset: int, pool: list[int], dtype: torch.dtype
) -> None:
    """Groups of any even size, rows a stride apart that may be odd, scales at both ends of the range, mixed."""
    count = half * groups
    packed = ALL_BYTES.repeat(2)[offset : offset + rows * (count + 1)].view(rows, count + 1)[:, :count]
    scale = torch.tensor(pool, dtype=torch.uint8).repeat(12)[: rows * groups].view(rows, groups)
    nibble = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)
    factors = in_ml_dtypes(scale, "float8_e8m0fnu").double().repeat_interleave(2 * half, dim=1)
    expected = (in_ml_dtypes(nibble, "float4_e2m1fn").double() * factors).to(torch.float32).to(dtype)
    found = e2m1_times_e8m0(packed, scale, dtype)
    assert found.dtype == dtype
    assert bits_of(found.float()) == bits_of(expected.float())
