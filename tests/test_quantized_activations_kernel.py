"""Activations as MXFP8, the judged half of the A5's linears: the kernel's bytes against the golden quantiser's."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from v41_config import FLASH, MX_GROUP, TINY
from v41_goldens.quantisers import Quantized, quantize_activation
from v41_kernels import Executor, Tier
from v41_kernels.registry import STAGES

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pypto has wheels for Linux only")

UNTOUCHED = 7


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with Executor(operators=STAGES) as shared:
        yield shared


def rows_of_every_size(rows: int, width: int) -> Tensor:
    """Magnitudes over sixty binary orders; zeros of both signs, an exact power of two, an infinity and a NaN."""
    generator = torch.Generator().manual_seed(rows + width)
    x = torch.randn(rows, width, generator=generator)
    x *= torch.exp2(torch.randint(-30, 30, (rows, 1), generator=generator).float())
    if rows > 4:
        x[0] = 0.0
        x[1, ::2] = -0.0
        x[2, :MX_GROUP] = 448.0
        x[3, 5], x[4, 7] = torch.inf, torch.nan
    return x.bfloat16()


def run(executor: Executor, x: Tensor, active: int, tier: Tier) -> Quantized:
    codes = torch.full(x.shape, UNTOUCHED, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.full((x.shape[0], x.shape[1] // MX_GROUP), UNTOUCHED, dtype=torch.uint8)
    scale = scale.view(torch.float8_e8m0fnu)
    executor.run("quantized_activations", tier, x=x, num_tokens=active, codes=codes, scale=scale)
    return Quantized(codes, scale)


def assert_equal_bytes(found: Quantized, x: Tensor, active: int) -> None:
    """A group whose scale is NaN is NaN as a whole, whatever its codes say."""
    golden = quantize_activation(x)
    assert torch.equal(found.scale.view(torch.uint8)[:active], golden.scale.view(torch.uint8)[:active])
    ordinary = ~golden.scale.float().isnan().repeat_interleave(MX_GROUP, 1)[:active]
    codes = found.payload.view(torch.uint8)
    assert torch.equal(codes[:active][ordinary], golden.payload.view(torch.uint8)[:active][ordinary])
    assert all((part.view(torch.uint8)[active:] == UNTOUCHED).all() for part in found)


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize(("rows", "active"), [(0, 0), (13, 11)])
def test_every_byte_is_the_goldens(executor: Executor, rows: int, active: int, tier: Tier) -> None:
    x = rows_of_every_size(rows, TINY.hidden_size)
    assert_equal_bytes(run(executor, x, active, tier), x, active)


@pytest.mark.parametrize("width", [FLASH.hidden_size, FLASH.moe_intermediate_size, 3 * MX_GROUP])
def test_every_byte_at_the_widths_of_the_released_model_after_all_passes(executor: Executor, width: int) -> None:
    x = rows_of_every_size(5, width)
    assert_equal_bytes(run(executor, x, 5, Tier.PASSES), x, 5)


@pytest.mark.parametrize("part", [0, 1], ids=Quantized._fields)
def test_one_wrong_byte_is_refused(part: int) -> None:
    x = rows_of_every_size(8, TINY.hidden_size)
    wrong = Quantized(*(exact.clone() for exact in quantize_activation(x)))
    assert_equal_bytes(wrong, x, 8)
    wrong[part].view(torch.uint8)[5, 1] ^= 1
    with pytest.raises(AssertionError):
        assert_equal_bytes(wrong, x, 8)
