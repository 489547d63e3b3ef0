"""The generator's bit arithmetic against torch's casts, brute force and literal bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from v41_loader.synth.block_formats import (
    E2M1,
    E4M3,
    bf16_bits,
    fp4_groups,
    fp8_tiles,
    pow2_ceil_exponent,
    small_float_codes,
)
from v41_loader.synth.random_streams import WordStream, normal, uniform

E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
ONE = np.ones(1, np.float32)


def neighbours(values: list[float]) -> np.ndarray:
    """Each value with the FP32 numbers just below and above it, both signs."""
    at = np.array(values, np.float32)
    near = np.concatenate([at, np.nextafter(at, np.float32(0)), np.nextafter(at, np.float32(1e9))])
    return np.concatenate([near, -near]).astype(np.float32)


def e4m3_points() -> list[float]:
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    midpoints = (values[1:] + values[:-1]) / 2
    return [*values.tolist(), *midpoints.tolist()]


def test_e4m3_codes_equal_torchs_cast_around_every_code_and_midpoint() -> None:
    values = neighbours(e4m3_points())
    values = values[np.abs(values) <= 448]
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(small_float_codes(values.view(np.int32), ONE, E4M3), expected)


@given(st.lists(st.floats(-448, 448, width=32), min_size=1, max_size=64))
def test_e4m3_codes_equal_torchs_cast(numbers: list[float]) -> None:
    values = np.array(numbers, np.float32)
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(small_float_codes(values.view(np.int32), ONE, E4M3), expected)


def test_e2m1_ties_go_to_the_even_code() -> None:
    values = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0, 6.0, -0.0], np.float32)
    codes = small_float_codes(values.view(np.int32), ONE, E2M1)
    assert codes.tolist() == [0, 2, 2, 4, 4, 6, 6, 8, 8 + 6, 7, 8]


@given(st.lists(st.floats(-6, 6, width=32), min_size=1, max_size=64))
def test_e2m1_codes_are_the_nearest(numbers: list[float]) -> None:
    values = np.array(numbers + neighbours([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).tolist(), np.float32)
    codes = small_float_codes(values.view(np.int32), ONE, E2M1)
    distance = np.abs(np.abs(values.astype(np.float64))[:, None] - np.array(E2M1_VALUES))
    best = distance.min(axis=1)
    tied = (distance == best[:, None]).sum(axis=1) > 1
    np.testing.assert_array_equal(distance[np.arange(len(values)), codes & 7], best)
    assert not (codes[tied] & 1).any()
    np.testing.assert_array_equal(codes >> 3, np.signbit(values))


def test_scale_exponent_is_the_power_of_two_at_or_above() -> None:
    for exponent in range(-40, 20):
        exact = np.float32(2.0**exponent)
        around = np.array([np.nextafter(exact, np.float32(0)), exact, np.nextafter(exact, np.float32(1e9))], np.float32)
        assert pow2_ceil_exponent(around).tolist() == [127 + exponent, 127 + exponent, 128 + exponent]


@given(st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=1))
def test_bf16_bits_equal_torchs_cast(numbers: list[float]) -> None:
    values = np.array(numbers, np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(bf16_bits(values), expected)


def test_fp4_puts_the_even_element_in_the_low_nibble() -> None:
    row = np.array([[E2M1_VALUES[i % 8] * (-1) ** (i // 8) for i in range(32)]], np.float32)
    codes, scale = fp4_groups(row)
    assert scale.tolist() == [[127]]  # amax 6 needs scale 1
    assert codes.shape == (1, 16)
    nibbles = [n for byte in codes[0].tolist() for n in (byte & 15, byte >> 4)]
    assert nibbles == [i % 16 for i in range(32)]


def test_fp8_scales_each_tile_alone() -> None:
    values = np.full((32, 1120), 1.0, np.float32)
    values[5, 40] = 449.0  # above 448: the tile's scale is 2
    values[31, 1100] = -448.0  # exactly representable: scale 1
    codes, scale = fp8_tiles(values)
    assert scale.tolist() == [128 if tile == 1 else 127 if tile == 34 else 127 - 8 for tile in range(35)]
    decoded = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    assert decoded[5, 40] == 224.0  # 224.5 rounded to steps of 16
    assert decoded[31, 1100] == -448.0
    assert decoded[0, 40] == 0.5
    assert decoded[0, 0] == decoded[31, 1087] == 256.0  # 1 = 256 * 2^-8, since 512 * 2^-9 would pass 448


def test_an_all_zero_block_has_the_floor_scale() -> None:
    codes, scale = fp4_groups(np.zeros((2, 32), np.float32))
    assert not codes.any()
    assert set(scale.reshape(-1).tolist()) == {int(np.ceil(np.log2(1e-10 / 6))) + 127}


def raw_words(seed: int, name_crc: int, count: int) -> np.ndarray:
    return np.asarray(np.random.Philox(key=np.array([seed, name_crc], np.uint64)).random_raw(count))


@given(st.integers(0, 2**64 - 1), st.integers(0, 41), st.integers(0, 40))
def test_a_stream_can_start_at_any_word(seed: int, start: int, count: int) -> None:
    whole = raw_words(seed, 0xCBF43926, 100)  # the CRC-32 of "123456789"
    np.testing.assert_array_equal(WordStream(seed, "123456789", start).take(count), whole[start : start + count])


def test_normal_and_uniform_are_the_recipes_arithmetic() -> None:
    words = raw_words(1, 2, 4096)
    std = (4 * (65536**2 - 1) / 12) ** 0.5
    expected = [(sum((w >> s) & 0xFFFF for s in (0, 16, 32, 48)) - 131070) / std for w in words.tolist()]
    assert uniform(words, -3.0, 2.5).tolist() == [-3.0 + 5.5 * ((w >> 40) / 2.0**24) for w in words.tolist()]
    assert normal(words).tolist() == expected
    assert np.std(expected) == pytest.approx(1, abs=0.05)
