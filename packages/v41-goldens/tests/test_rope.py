"""RoPE: frequencies that were worked out by hand, tables, rows and rotation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from v41_config import FLASH, TINY, RopeProfile
from v41_goldens.errors import OperandError, PositionError
from v41_goldens.judges import assert_equal_bits
from v41_goldens.rope import apply_rope, materialize_rope_rows, precompute_rope_tables, rope_frequencies


def random_rows(seed: int, tokens: int, half: int = 32) -> tuple[Tensor, Tensor]:
    angles = torch.rand(tokens, half, generator=torch.Generator().manual_seed(seed)) * 7
    return angles.cos(), angles.sin()


def random_x(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_released_frequencies() -> None:
    swa, compressed = rope_frequencies(FLASH, "swa"), rope_frequencies(FLASH, "compressed")
    assert swa.dtype == compressed.dtype == torch.float32
    index = torch.arange(32, dtype=torch.float64)
    torch.testing.assert_close(swa.double(), 10000 ** (-index / 32), rtol=3e-7, atol=0)
    plain = 160000 ** (-index / 32)
    # Pairs 0 to 15 keep their frequency, from 25 on it is a sixteenth; a ramp of tenths lies between.
    ramp = ((index - 15) / 10).clamp(0, 1)
    torch.testing.assert_close(compressed.double(), plain * (1 - ramp * 15 / 16), rtol=1e-6, atol=0)
    assert compressed[16].item() == pytest.approx(0.002265625, rel=1e-6)
    assert compressed[24].item() == pytest.approx(1.25e-4 * (0.1 + 0.9 / 16), rel=1e-6)


def test_yarn_ramp_of_a_short_original_context_is_clamped() -> None:
    """TINY's original context is so short that the ramp starts at pair 0, and may not start below."""
    compressed = rope_frequencies(TINY, "compressed").double()
    pairs = TINY.qk_rope_head_dim // 2
    plain = 160000 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    assert compressed[0].item() == 1.0
    assert (compressed <= plain * (1 + 1e-6)).all()
    assert (compressed >= plain / 16 * (1 - 1e-6)).all()
    assert compressed[-1].item() == pytest.approx(plain[-1].item() / 16, rel=1e-6)


@pytest.mark.parametrize("profile", ["swa", "compressed"])
def test_tables_are_functions_of_the_fp32_angle(profile: RopeProfile) -> None:
    freqs_cos, freqs_sin = precompute_rope_tables(FLASH, profile, 70000)  # more than the rows computed at a time
    assert freqs_cos.shape == freqs_sin.shape == (70000, 32)
    frequencies = rope_frequencies(FLASH, profile)
    for position in (0, 1, 127, 32767, 32768, 65535, 65537, 69999):
        angles = [(torch.tensor(float(position)) * f).item() for f in frequencies]
        assert_equal_bits(freqs_cos[position], torch.tensor([math.cos(a) for a in angles]), f"cos {position}")
        assert_equal_bits(freqs_sin[position], torch.tensor([math.sin(a) for a in angles]), f"sin {position}")


def test_a_shorter_table_is_a_prefix() -> None:
    long, short = (precompute_rope_tables(TINY, "compressed", capacity) for capacity in (300, 7))
    assert_equal_bits(short[0], long[0][:7], "cos")
    assert_equal_bits(short[1], long[1][:7], "sin")
    assert precompute_rope_tables(TINY, "swa", 0)[0].shape == (0, TINY.qk_rope_head_dim // 2)


def test_rows_are_those_of_the_positions() -> None:
    freqs_cos, freqs_sin = precompute_rope_tables(TINY, "swa", 50)
    positions = torch.tensor([49, 0, -1, 7, 7, -5], dtype=torch.int32)
    cos, sin = materialize_rope_rows(freqs_cos, freqs_sin, positions, 6)
    for row, position in enumerate(positions.tolist()):
        if position < 0:
            assert cos[row].eq(1).all()
            assert sin[row].eq(0).all()
        else:
            assert_equal_bits(cos[row], freqs_cos[position], f"cos {row}")
            assert_equal_bits(sin[row], freqs_sin[position], f"sin {row}")
    cos.zero_()
    assert freqs_cos[0].eq(1).all()  # rows are a copy: the table is shared by every call


def test_padding_rows_are_zero_and_their_positions_are_not_looked_at() -> None:
    freqs_cos, freqs_sin = precompute_rope_tables(TINY, "swa", 8)
    positions = torch.tensor([3, 4, 2**31 - 1, 8], dtype=torch.int32)
    cos, sin = materialize_rope_rows(freqs_cos, freqs_sin, positions, 2)
    assert_equal_bits(cos[:2], freqs_cos[3:5], "active")
    assert not cos[2:].any()
    assert not sin[2:].any()
    nothing, _ = materialize_rope_rows(freqs_cos, freqs_sin, positions, 0)
    assert nothing.shape == (4, TINY.qk_rope_head_dim // 2)
    assert not nothing.any()
    assert materialize_rope_rows(freqs_cos, freqs_sin, positions[:0], 0)[0].shape[0] == 0


def test_positions_outside_the_table_are_refused() -> None:
    tables = precompute_rope_tables(TINY, "swa", 8)
    with pytest.raises(PositionError, match="capacity 8, found 8"):
        materialize_rope_rows(*tables, torch.tensor([0, 8], dtype=torch.int32), 2)
    for num_tokens in (-1, 3):
        with pytest.raises(PositionError, match="num_tokens"):
            materialize_rope_rows(*tables, torch.tensor([0, 1], dtype=torch.int32), num_tokens)


def test_only_the_last_channels_rotate_and_pairs_are_adjacent() -> None:
    x = random_x(0, 3, 4, 128)
    cos, sin = random_rows(1, 3)
    y = apply_rope(x, cos, sin)
    assert_equal_bits(y[..., :64].contiguous(), x[..., :64].contiguous(), "channels before the last r")
    even, odd = x[..., 64::2].double(), x[..., 65::2].double()
    c, s = (rows.double().unsqueeze(1) for rows in (cos, sin))
    torch.testing.assert_close(y[..., 64::2].double(), even * c - odd * s, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(y[..., 65::2].double(), even * s + odd * c, rtol=2**-8, atol=1e-6)


def test_products_are_rounded_to_fp32_before_they_are_added() -> None:
    """(a*cos) - (b*sin) in FP32: with b*sin = a*cos but for the rounding the exact difference would show."""
    a = torch.tensor([[1.0, 1.0]]).bfloat16()
    cos, sin = torch.tensor([[0.1]]), torch.tensor([[0.1]])
    assert apply_rope(a, cos, sin).tolist() == [[0.0, torch.tensor(0.2).bfloat16().item()]]


def test_inverse_is_the_conjugate() -> None:
    x, (cos, sin) = random_x(2, 5, 64), random_rows(3, 5)
    assert_equal_bits(apply_rope(x, cos, sin, inverse=True), apply_rope(x, cos, -sin), "conjugate")
    back = apply_rope(apply_rope(x, cos, sin), cos, sin, inverse=True)
    torch.testing.assert_close(back.float(), x.float(), rtol=0, atol=0.05)
    assert not torch.equal(apply_rope(x, cos, sin), apply_rope(x, cos, sin, inverse=True))


def test_identity_rows_change_nothing() -> None:
    x = random_x(4, 2, 3, 64)
    assert_equal_bits(apply_rope(x, torch.ones(2, 32), torch.zeros(2, 32)), x, "identity")


def test_every_token_has_its_own_angle() -> None:
    """Several tokens in one call equal one call for each, whatever the heads in between."""
    x, (cos, sin) = random_x(5, 6, 2, 3, 96), random_rows(6, 6)
    whole = apply_rope(x, cos, sin)
    for t in range(6):
        one = apply_rope(x[t : t + 1], cos[t : t + 1], sin[t : t + 1])
        assert_equal_bits(one, whole[t : t + 1], f"token {t}")
    assert apply_rope(x[:0], cos[:0], sin[:0]).shape == (0, 2, 3, 96)


def test_operands_that_do_not_fit_are_refused() -> None:
    cos, sin = random_rows(7, 2)
    for x in (random_x(8, 3, 64), random_x(8, 2, 32)):
        with pytest.raises(OperandError, match="apply_rope"):
            apply_rope(x, cos, sin)
    with pytest.raises(OperandError, match="apply_rope"):
        apply_rope(random_x(8, 2, 64), cos, sin[:, :16])
