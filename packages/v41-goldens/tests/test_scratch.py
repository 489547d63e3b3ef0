"""Memory that is used again: one thread's, in any mode, and never what a caller holds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from v41_goldens import scratch as scratch_module
from v41_goldens.judges import assert_equal_bits
from v41_goldens.quantisers import quantize_activation
from v41_goldens.scratch import scratch
from v41_goldens.weights import Fp4Weight, Fp8Weight

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch_module, "_KEPT", scratch_module._Kept())


def decoded(seed: int, rows: int) -> list[Tensor]:
    """Everything that goes through scratch memory, of operands of this seed."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 127, (rows, 64), dtype=torch.uint8, generator=generator)
    scale = torch.randint(100, 140, (rows, 2), dtype=torch.uint8, generator=generator).view(torch.float8_e8m0fnu)
    fp4 = Fp4Weight(codes[:, :32].contiguous().view(torch.int8), scale)
    fp8 = Fp8Weight(codes.view(torch.float8_e4m3fn), scale[::32].contiguous())
    x = torch.randn(rows, 64, generator=generator).bfloat16()
    numbers = [w.dequantize(dtype) for w in (fp4, fp8) for dtype in (torch.float32, torch.bfloat16)]
    return [*numbers, *(part.view(torch.uint8) for part in quantize_activation(x))]


def test_it_is_the_same_memory_until_more_is_needed() -> None:
    first = scratch(100, torch.float32, CPU)
    assert scratch(40, torch.float32, CPU).data_ptr() == first.data_ptr()
    assert scratch(40, torch.int64, CPU).data_ptr() != first.data_ptr()
    larger = scratch(1000, torch.float32, CPU)
    assert larger.shape == (1000,)
    assert scratch(100, torch.float32, CPU).data_ptr() == larger.data_ptr()


def test_what_is_too_large_or_elsewhere_is_new() -> None:
    count = scratch_module._LARGEST_BYTES // 4 + 1
    assert scratch(count, torch.float32, CPU).data_ptr() != scratch(count, torch.float32, CPU).data_ptr()
    assert scratch(5, torch.float32, torch.device("meta")).is_meta
    assert scratch_module._KEPT.tensors == {}


def test_memory_of_inference_mode_can_be_written_outside_of_it() -> None:
    with torch.inference_mode():
        inside = [part.clone() for part in decoded(0, 64)]
    for found, expected in zip(decoded(0, 64), inside, strict=True):
        assert_equal_bits(found, expected, "outside")


def test_results_do_not_change_with_later_calls() -> None:
    results = decoded(1, 64)
    copies = [part.clone() for part in results]
    decoded(2, 96)
    for found, expected in zip(results, copies, strict=True):
        assert_equal_bits(found, expected, "kept result")


def test_threads_have_their_own() -> None:
    def place() -> int:
        return scratch(100, torch.float32, CPU).data_ptr()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(place).result() != place()
        assert pool.submit(place).result() == pool.submit(place).result()
