"""Every listed kernel gives the bits of the golden of its name, in both tiers, at TINY and FLASH widths."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from v41_config import FLASH, TINY, ModelConfig
from v41_goldens.hyper_connections import mhc_post, mhc_split
from v41_goldens.judges import JudgementError, assert_equal_bits, assert_untouched_rows
from v41_goldens.rms_norm import rms_norm
from v41_goldens.rope import materialize_rope_rows, precompute_rope_tables
from v41_kernels import OPERATORS, Executor, Tier

SENTINEL = -7.0
CONFIGS = pytest.mark.parametrize("config", [TINY, FLASH], ids=["TINY", "FLASH"])
CASES = pytest.mark.parametrize(
    ("tier", "rows", "active"),
    [
        *((Tier.GRAPH, rows, active) for rows, active in [(0, 0), (5, 0), (1, 1), (13, 11), (40, 40)]),
        *((Tier.PASSES, rows, active) for rows, active in [(0, 0), (13, 11)]),
    ],
)


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    if not sys.platform.startswith("linux"):
        pytest.skip("pypto has wheels for Linux only: no kernel was compared")
    with Executor(timeout=300.0) as shared:
        yield shared


def assert_like_golden(actual: Tensor, golden: Tensor, active: int, name: str) -> None:
    """The golden's bits in the active rows, the sentinel's in all others."""
    assert_equal_bits(actual[:active], golden[:active], name)
    assert_untouched_rows(actual, torch.full_like(actual, SENTINEL), active, name)


def seeded(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(numbers) % 2**31)


# ---------------------------------------------------------------------------------------------------- rms_norm


def norm_arguments(config: ModelConfig, rows: int) -> tuple[Tensor, Tensor]:
    """Rows of four magnitudes: ordinary, where eps matters, large, and zero."""
    generator = seeded(config.hidden_size, rows)
    x = torch.randn(rows, config.hidden_size, generator=generator)
    x *= torch.tensor([1.0, 1e-10, 3000.0, 0.0])[torch.arange(rows) % 4, None]
    return x.bfloat16(), torch.randn(config.hidden_size, generator=generator).bfloat16()


@CONFIGS
@CASES
def test_rms_norm(executor: Executor, config: ModelConfig, tier: Tier, rows: int, active: int) -> None:
    x, weight = norm_arguments(config, rows)
    out = torch.full_like(x, SENTINEL)
    eps = config.rms_norm_eps
    executor.run("rms_norm", tier, x=x, weight=weight, num_tokens=active, eps=eps, out=out)
    assert_like_golden(out, rms_norm(x, weight, eps), active, "rms_norm")


def fp32_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Mean and root in plain FP32, the one that comes to mind first."""
    values = x.float()
    return (values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).bfloat16()


@pytest.mark.parametrize("wrong", ["no eps", "two roundings", "one element one unit off", "plain FP32"])
def test_wrong_norms_are_refused(wrong: str) -> None:
    x, weight = norm_arguments(FLASH, 40)
    golden = rms_norm(x, weight, FLASH.rms_norm_eps)
    off = golden.clone()
    off.view(torch.int16)[0, 0] += 1
    answers = {
        "no eps": rms_norm(x, weight, 0.0),
        "two roundings": rms_norm(x, torch.ones_like(weight), FLASH.rms_norm_eps) * weight,
        "one element one unit off": off,
        "plain FP32": fp32_norm(x, weight, FLASH.rms_norm_eps),
    }
    with pytest.raises(JudgementError):
        assert_like_golden(answers[wrong], golden, 40, "rms_norm")


def test_the_golden_is_accepted_but_not_with_a_padding_row_touched() -> None:
    x, weight = norm_arguments(TINY, 40)
    golden = rms_norm(x, weight, TINY.rms_norm_eps)
    assert_like_golden(golden, golden, 40, "rms_norm")
    padded = golden.clone()
    padded[9:] = SENTINEL
    assert_like_golden(padded, golden, 9, "rms_norm")
    padded[9, 5] = 0.0
    with pytest.raises(JudgementError):
        assert_like_golden(padded, golden, 9, "rms_norm")


# ---------------------------------------------------------------------------------------- materialize_rope_rows

CAPACITY = 64


def rope_arguments(config: ModelConfig, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The config's own compressed table, and positions of which a third is not published."""
    cos, sin = precompute_rope_tables(config, "compressed", CAPACITY)
    positions = torch.randint(0, CAPACITY, (rows,), generator=seeded(rows), dtype=torch.int32)
    positions[::3] = -1
    return cos, sin, positions


@CONFIGS
@CASES
def test_materialize_rope_rows(executor: Executor, config: ModelConfig, tier: Tier, rows: int, active: int) -> None:
    cos, sin, positions = rope_arguments(config, rows)
    found = [torch.full((rows, cos.shape[1]), SENTINEL) for _ in range(2)]
    executor.run(
        "materialize_rope_rows",
        tier,
        freqs_cos=cos,
        freqs_sin=sin,
        position_ids=positions,
        num_tokens=active,
        rope_cos=found[0],
        rope_sin=found[1],
    )
    for name, actual, golden in zip(
        ("rope_cos", "rope_sin"), found, materialize_rope_rows(cos, sin, positions, active), strict=True
    ):
        assert_like_golden(actual, golden, active, name)


def test_wrong_rope_rows_are_refused() -> None:
    cos, sin, positions = rope_arguments(TINY, 16)
    golden, _ = materialize_rope_rows(cos, sin, positions, 16)
    shifted, _ = materialize_rope_rows(cos, sin, (positions + 1).clamp_max(CAPACITY - 1), 16)
    for wrong in (shifted, golden + 1e-7):
        with pytest.raises(JudgementError):
            assert_like_golden(wrong, golden, 16, "rope_cos")


# ---------------------------------------------------------------------------------------------------- mhc_post


def expand_arguments(config: ModelConfig, rows: int) -> dict[str, Tensor]:
    """Coefficients as a hyper-connection gives them; every fourth row has streams that nearly cancel."""
    hc, width = config.hc_mult, config.hidden_size
    generator = seeded(width, rows, 1)
    mixes = torch.randn(rows, (2 + hc) * hc, generator=generator) * 3
    _, post, comb = mhc_split(mixes, torch.ones(3), torch.randn((2 + hc) * hc, generator=generator), config)
    x_hc = torch.randn(rows, hc, width, generator=generator) * 30
    x_hc[3::4, 1] = -x_hc[3::4, 0] * 1.01
    y = torch.randn(rows, width, generator=generator)
    return {"y": y.bfloat16(), "x_hc": x_hc.bfloat16(), "post": post, "comb": comb}


@CONFIGS
@CASES
def test_mhc_post(executor: Executor, config: ModelConfig, tier: Tier, rows: int, active: int) -> None:
    arguments = expand_arguments(config, rows)
    out = torch.full_like(arguments["x_hc"], SENTINEL)
    executor.run("mhc_post", tier, num_tokens=active, out=out, **arguments)
    assert_like_golden(out, mhc_post(**arguments), active, "mhc_post")


def test_mhc_post_gives_the_goldens_zeros(executor: Executor) -> None:
    """All terms -0: the golden's sum of the streams is +0 (never -0), and so is the kernel's."""
    arguments = expand_arguments(TINY, 8)
    arguments["x_hc"].fill_(-0.0)
    arguments["y"].fill_(-0.0)
    out = torch.full_like(arguments["x_hc"], SENTINEL)
    executor.run("mhc_post", out=out, **arguments)
    assert_like_golden(out, mhc_post(**arguments), 8, "mhc_post")


def test_wrong_expands_are_refused() -> None:
    arguments = expand_arguments(TINY, 16)
    golden = mhc_post(**arguments)
    transposed = mhc_post(**arguments | {"comb": arguments["comb"].transpose(1, 2)})
    touched = golden.clone()
    touched[9:] = SENTINEL
    assert_like_golden(touched, golden, 9, "mhc_post")
    touched[9, 0, 0] = 0.0
    for wrong, active in ((transposed, 16), (touched, 9)):
        with pytest.raises(JudgementError):
            assert_like_golden(wrong, golden, active, "mhc_post")


def test_every_listed_operator_is_compared() -> None:
    compared = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert set(OPERATORS) <= compared
