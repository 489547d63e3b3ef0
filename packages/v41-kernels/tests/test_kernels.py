"""Kernels, executed, against float64 transcriptions of their formulas; destinations in place, padding untouched.

A result that was rounded once lies within half a BF16 unit of the float64 value, plus what FP32 arithmetic before the
rounding may add. That margin is written out per operator, and each operator has wrong answers that must be refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from v41_config import FLASH, TINY
from v41_kernels import CHECKED_PASSES, Executor, KernelRun, Tier

PADDING = -7.0
HC = TINY.hc_mult
WIDTHS = pytest.mark.parametrize("width", [TINY.hidden_size, FLASH.hidden_size], ids=["TINY", "FLASH"])
HALF_ROPES = pytest.mark.parametrize(
    "half_rope", [TINY.qk_rope_head_dim // 2, FLASH.qk_rope_head_dim // 2], ids=["TINY", "FLASH"]
)
# Rows and active rows: nothing, nothing active, one, a tail alone, whole tiles, a tail, padding in and behind it.
EXTENTS = pytest.mark.parametrize(
    ("rows", "active"), [(0, 0), (5, 0), (1, 1), (5, 3), (8, 8), (13, 13), (16, 9), (37, 37)]
)
FEW_EXTENTS = pytest.mark.parametrize(("rows", "active"), [(0, 0), (5, 0), (13, 11)])


def round_off(value: Tensor) -> Tensor:
    """Half a BF16 unit in the last place at float64 `value`: 8 significant bits, half of the last one."""
    return torch.ldexp(torch.ones_like(value), torch.frexp(value).exponent - 9)


def assert_rounded_once(found: Tensor, exact: Tensor, margin: Tensor) -> None:
    """BF16 `found` is the rounding of something within `margin` of float64 `exact`."""
    error = (found.double() - exact).abs()
    wrong = ~(error <= round_off(exact) + margin)  # so that NaN is wrong, too
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()}, first {wrong.nonzero()[0].tolist()}"


def assert_passes_were_judged(run: KernelRun, active: int) -> None:
    """In the passes tier every checked pass was compared, if there was anything to compare."""
    judged = {check.pass_name for check in run.checks if check.compared}
    assert judged == (set(CHECKED_PASSES) if run.tier is Tier.PASSES and active else set())


# ---------------------------------------------------------------------------------------------------- rms_norm


@dataclass
class RmsNorm:
    """Rows of ordinary size, of zeros, and small enough for eps to matter; NaN behind the active ones."""

    x: Tensor
    weight: Tensor
    active: int
    eps: float = 1e-20

    @classmethod
    def make(cls, rows: int, active: int, width: int) -> RmsNorm:
        generator = torch.Generator().manual_seed(rows * 100 + active)
        x = torch.randn(rows, width, generator=generator)
        x[1::4] *= 1e-10
        x[2::4] *= 3000.0
        x[3::4] = 0.0
        x[active:] = torch.nan
        return cls(x.bfloat16(), torch.randn(width, generator=generator).bfloat16(), active)

    def run(self, executor: Executor, tier: Tier) -> Tensor:
        out = torch.full_like(self.x, PADDING)
        run = executor.run(
            "rms_norm", tier, x=self.x, weight=self.weight, num_tokens=self.active, eps=self.eps, out=out
        )
        assert_passes_were_judged(run, self.active)
        return out

    def judge(self, out: Tensor) -> None:
        x = self.x[: self.active].double()
        exact = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight.double()
        # FP32: a sum over up to 5,120 squares by parts (relative error below 16 units of 2^-24), rsqrt, two products.
        assert_rounded_once(out[: self.active], exact, exact.abs() * 2**-19)
        assert torch.equal(out[self.active :], torch.full_like(out[self.active :], PADDING))


@WIDTHS
@EXTENTS
def test_rms_norm(executor: Executor, rows: int, active: int, width: int) -> None:
    case = RmsNorm.make(rows, active, width)
    case.judge(case.run(executor, Tier.GRAPH))


@WIDTHS
@FEW_EXTENTS
def test_rms_norm_after_all_passes(executor: Executor, rows: int, active: int, width: int) -> None:
    case = RmsNorm.make(rows, active, width)
    case.judge(case.run(executor, Tier.PASSES))


@pytest.mark.parametrize("width", [1, 16, 100, 1280, 2304])
def test_rms_norm_of_any_width(executor: Executor, width: int) -> None:
    """Narrower than a tile, no multiple of one, and the widths of the query norm and the experts."""
    case = RmsNorm.make(13, 11, width)
    case.judge(case.run(executor, Tier.PASSES))


def test_another_eps_is_used(executor: Executor) -> None:
    case = RmsNorm.make(13, 13, TINY.hidden_size)
    case.eps = 0.5
    case.judge(case.run(executor, Tier.GRAPH))


def rounded_before_the_weight(case: RmsNorm) -> Tensor:
    x = case.x.double()
    normalised = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + case.eps)).bfloat16()
    return (normalised.double() * case.weight.double()).bfloat16()


def without_eps(case: RmsNorm) -> Tensor:
    x = case.x.double()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * case.weight.double()).bfloat16()


def one_unit_off(case: RmsNorm) -> Tensor:
    """All but one element are right; that one is the next BF16 number."""
    x = case.x.double()
    out = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + case.eps) * case.weight.double()).bfloat16()
    out.view(torch.int16)[0, 0] += 1
    return out


@pytest.mark.parametrize("wrong", [rounded_before_the_weight, without_eps, one_unit_off])
def test_a_wrong_norm_is_refused(wrong: Callable[[RmsNorm], Tensor]) -> None:
    case = RmsNorm.make(13, 13, TINY.hidden_size)
    with pytest.raises(AssertionError, match="first"):
        case.judge(wrong(case))


def test_a_padding_row_that_was_touched_is_refused(executor: Executor) -> None:
    case = RmsNorm.make(16, 9, TINY.hidden_size)
    out = case.run(executor, Tier.GRAPH)
    case.judge(out)
    out[9, 5] = 0.0
    with pytest.raises(AssertionError):
        case.judge(out)


# ---------------------------------------------------------------------------------------- materialize_rope_rows


@dataclass
class RopeRows:
    """Tables that hold NaN wherever no active position points, row 0 included."""

    freqs_cos: Tensor
    freqs_sin: Tensor
    position_ids: Tensor
    active: int

    @classmethod
    def make(cls, rows: int, active: int, half_rope: int, capacity: int = 50) -> RopeRows:
        generator = torch.Generator().manual_seed(rows * 100 + active)
        positions = torch.randint(1, capacity, (rows,), generator=generator, dtype=torch.int32)
        positions[::3] = -1
        positions[4::7] = capacity - 1
        positions[5::9] = -(2**31)
        positions[active:] = 2**31 - 1  # behind the tables: padding is not looked at
        tables = torch.randn(2, capacity, half_rope, generator=generator)
        used = positions[:active][positions[:active] >= 0]
        unused = torch.ones(capacity, dtype=torch.bool)
        unused[used.long()] = False
        tables[:, unused] = torch.nan
        return cls(tables[0].contiguous(), tables[1].contiguous(), positions, active)

    def run(self, executor: Executor, tier: Tier) -> tuple[Tensor, Tensor]:
        shape = (self.position_ids.shape[0], self.freqs_cos.shape[1])
        cos, sin = torch.full(shape, PADDING), torch.full(shape, PADDING)
        run = executor.run(
            "materialize_rope_rows",
            tier,
            freqs_cos=self.freqs_cos,
            freqs_sin=self.freqs_sin,
            position_ids=self.position_ids,
            num_tokens=self.active,
            rope_cos=cos,
            rope_sin=sin,
        )
        assert_passes_were_judged(run, self.active)
        return cos, sin

    def wanted(self, shift: int = 0) -> tuple[Tensor, Tensor]:
        cos, sin = (torch.full((self.position_ids.shape[0], self.freqs_cos.shape[1]), PADDING) for _ in range(2))
        for token, position in enumerate(self.position_ids[: self.active].tolist()):
            cos[token] = 1.0 if position < 0 else self.freqs_cos[position - shift]
            sin[token] = 0.0 if position < 0 else self.freqs_sin[position - shift]
        return cos, sin

    def judge(self, found: tuple[Tensor, Tensor]) -> None:
        for name, one, other in zip(("cos", "sin"), found, self.wanted(), strict=True):
            assert torch.equal(one, other), name


@HALF_ROPES
@EXTENTS
def test_rope_rows(executor: Executor, rows: int, active: int, half_rope: int) -> None:
    case = RopeRows.make(rows, active, half_rope)
    case.judge(case.run(executor, Tier.GRAPH))


@HALF_ROPES
@FEW_EXTENTS
def test_rope_rows_after_all_passes(executor: Executor, rows: int, active: int, half_rope: int) -> None:
    case = RopeRows.make(rows, active, half_rope)
    case.judge(case.run(executor, Tier.PASSES))


def test_rope_rows_of_any_width(executor: Executor) -> None:
    case = RopeRows.make(13, 11, 5)
    case.judge(case.run(executor, Tier.PASSES))


def test_a_position_behind_the_tables_writes_nothing(executor: Executor) -> None:
    case = RopeRows.make(13, 11, 16)
    case.position_ids[2] = 50
    cos = torch.full((13, 16), PADDING)
    with pytest.raises(match=r"position_ids\[2\]"):
        executor.run(
            "materialize_rope_rows",
            freqs_cos=case.freqs_cos,
            freqs_sin=case.freqs_sin,
            position_ids=case.position_ids,
            num_tokens=11,
            rope_cos=cos,
            rope_sin=torch.full_like(cos, PADDING),
        )
    assert torch.equal(cos, torch.full_like(cos, PADDING))


def test_wrong_rope_rows_are_refused() -> None:
    case = RopeRows.make(16, 9, 16)
    case.judge(case.wanted())
    with pytest.raises(AssertionError, match="cos"):
        case.judge(case.wanted(shift=1))
    cos, sin = case.wanted()
    sin[9, 0] = 0.0  # a padding row
    with pytest.raises(AssertionError, match="sin"):
        case.judge((cos, sin))


# ---------------------------------------------------------------------------------------------------- mhc_post


@dataclass
class MhcPost:
    """Coefficients without symmetry; streams that cancel in every other row; NaN behind the active rows."""

    y: Tensor
    x_hc: Tensor
    post: Tensor
    comb: Tensor
    active: int

    @classmethod
    def make(cls, rows: int, active: int, width: int) -> MhcPost:
        generator = torch.Generator().manual_seed(rows * 100 + active)
        y = torch.randn(rows, width, generator=generator)
        x_hc = torch.randn(rows, HC, width, generator=generator) * 100
        comb = torch.rand(rows, HC, HC, generator=generator)
        post = torch.rand(rows, HC, generator=generator) * 2
        x_hc[1::2, 1] = -x_hc[1::2, 0]  # with equal shares the two cancel
        comb[1::2, 1] = comb[1::2, 0]
        x_hc[3::4, 2:] *= 2.0**-20  # and what is left is 2^20 times smaller
        y[3::4] *= 2.0**-20
        for tensor in (y, x_hc, post, comb):
            tensor[active:] = torch.nan
        return cls(y.bfloat16(), x_hc.bfloat16(), post, comb, active)

    def run(self, executor: Executor, tier: Tier) -> Tensor:
        out = torch.full_like(self.x_hc, PADDING)
        run = executor.run(
            "mhc_post",
            tier,
            y=self.y,
            x_hc=self.x_hc,
            post=self.post,
            comb=self.comb,
            num_tokens=self.active,
            out=out,
        )
        assert_passes_were_judged(run, self.active)
        return out

    def exact(self, comb: Tensor) -> tuple[Tensor, Tensor]:
        """The float64 value, and the sizes of the terms that do not cancel by construction, added up."""
        mixed = torch.einsum("tjk,tjd->tkd", comb.double(), self.x_hc.double())
        direct = self.post.double().unsqueeze(-1) * self.y.double().unsqueeze(1)
        sizes = torch.einsum("tjk,tjd->tkd", comb.double(), self.x_hc.double().abs())
        cancelling = torch.einsum("tjk,tjd->tkd", comb[:, :2].double(), self.x_hc[:, :2].double().abs())
        sizes[1::2] -= cancelling[1::2]
        return mixed + direct, sizes + direct.abs()

    def judge(self, out: Tensor) -> None:
        exact, sizes = self.exact(self.comb)
        # FP32: each product, the sum (compensated: one rounding), the last addition. Equal products of the two
        # cancelling streams are rounded alike and leave nothing.
        assert_rounded_once(out[: self.active], exact[: self.active], sizes[: self.active] * 2**-22)
        assert torch.equal(out[self.active :], torch.full_like(out[self.active :], PADDING))


@WIDTHS
@EXTENTS
def test_mhc_post(executor: Executor, rows: int, active: int, width: int) -> None:
    case = MhcPost.make(rows, active, width)
    case.judge(case.run(executor, Tier.GRAPH))


@WIDTHS
@FEW_EXTENTS
def test_mhc_post_after_all_passes(executor: Executor, rows: int, active: int, width: int) -> None:
    case = MhcPost.make(rows, active, width)
    case.judge(case.run(executor, Tier.PASSES))


def test_mhc_post_of_any_width(executor: Executor) -> None:
    case = MhcPost.make(13, 11, 100)
    case.judge(case.run(executor, Tier.PASSES))


def test_a_wrong_expand_is_refused() -> None:
    case = MhcPost.make(13, 13, TINY.hidden_size)
    case.judge(case.exact(case.comb)[0].bfloat16())
    with pytest.raises(AssertionError, match="first"):
        case.judge(case.exact(case.comb.transpose(1, 2))[0].bfloat16())
    out = case.exact(case.comb)[0].bfloat16()
    out.view(torch.int16)[0, 0, 0] += 1
    with pytest.raises(AssertionError, match="1 of"):
        case.judge(out)


def test_an_uncompensated_sum_would_be_refused() -> None:
    """What the compensated sum is for: added one after the other, a small stream is lost beside two that cancel."""
    case = MhcPost.make(13, 13, TINY.hidden_size)
    total = torch.zeros(13, HC, TINY.hidden_size)
    for stream in (0, 2, 3, 1):  # the cancelling ones first and last
        total += case.comb[:, stream, :, None] * case.x_hc[:, stream, None, :].float()
    out = (case.post.unsqueeze(-1) * case.y.float().unsqueeze(1) + total).bfloat16()
    with pytest.raises(AssertionError, match="first"):
        case.judge(out)


def test_two_runs_give_the_same_bits(executor: Executor) -> None:
    case = MhcPost.make(13, 11, TINY.hidden_size)
    assert torch.equal(case.run(executor, Tier.GRAPH), case.run(executor, Tier.GRAPH))
