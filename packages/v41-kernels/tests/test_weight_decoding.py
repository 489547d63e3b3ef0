"""Every code of a packed weight, through a product with rows that have a single one: bits as the number format says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from v41_kernels import Executor, Tier

pytestmark = pytest.mark.parametrize("tier", list(Tier))

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def decoded_weights(
    executor: Executor, tier: Tier, name: str, inputs: int, codes: Tensor, scale: Tensor
) -> torch.Tensor:
    """The weights `[N, K]` that a kernel multiplies with: row `t` of the product is their column `t`."""
    out = torch.full((inputs, len(codes)), -7.0, dtype=torch.bfloat16)
    executor.run(name, tier, x=torch.eye(inputs).bfloat16(), w=codes, w_scale=scale, out=out)
    return out.t()


def test_every_e4m3_code(executor: Executor, tier: Tier) -> None:
    """All but the two NaN, in blocks of four scales."""
    codes = torch.arange(1 << 12).remainder(256).view(64, 64).byte()
    codes[codes % 128 == 127] = 0
    scale = torch.tensor([[127, 100], [110, 131]], dtype=torch.uint8)
    found = decoded_weights(
        executor, tier, "quantized_linear", 64, codes.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)
    )
    factors = torch.exp2(scale.float() - 127).repeat_interleave(32, 0).repeat_interleave(32, 1)
    assert torch.equal(found.float(), codes.view(torch.float8_e4m3fn).float() * factors)


def test_every_pair_of_e2m1_codes(executor: Executor, tier: Tier) -> None:
    packed = torch.arange(1 << 11).remainder(256).view(32, 64).byte()
    scale = torch.randint(100, 130, (32, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    found = decoded_weights(
        executor, tier, "quantized_linear_fp4", 128, packed.view(torch.int8), scale.view(torch.float8_e8m0fnu)
    )
    nibbles = torch.stack([packed % 16, packed // 16], dim=-1).flatten(1).long()
    values = E2M1[nibbles % 8] * (1 - 2 * (nibbles // 8))
    assert torch.equal(found.float(), values * torch.exp2(scale.float() - 127).repeat_interleave(32, 1))
