"""Memory that is used again: one thread's, in any mode, and never what a caller holds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from v41_goldens import exact, number_formats, quantisers
from v41_goldens import scratch as scratch_module
from v41_goldens.embedding import embedded_partial
from v41_goldens.judges import assert_equal_bits
from v41_goldens.number_formats import e2m1_decode
from v41_goldens.quantisers import quantize_activation
from v41_goldens.quantized_weights import Fp4Weight, Fp8Weight
from v41_goldens.scratch import new_matrix, scratch, scratch_matrix

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
    x = torch.randn(rows, 64, generator=generator, dtype=torch.float32).bfloat16()
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


def test_rows_of_a_matrix_are_not_multiples_of_a_page_apart() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        matrix = scratch_matrix(3, 4096, dtype, CPU)
        assert matrix.shape == (3, 4096)
        assert matrix.stride() == (4096 + 64 // dtype.itemsize, 1)
        assert matrix.data_ptr() == scratch(1, dtype, CPU).data_ptr()
        assert new_matrix(3, 4096, dtype, CPU).is_contiguous()


@pytest.mark.parametrize("scale", [2, 127, 253])
def test_rows_that_are_kept_are_in_memory_of_their_own(scale: int) -> None:
    """Scales of both ways in which FP4 is decoded; FP8 has one of its own for NaN."""
    scales = torch.full((64, 2), scale, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    codes = torch.arange(64 * 64, dtype=torch.int32).to(torch.uint8).view(64, 64)
    fp8 = Fp8Weight(codes.view(torch.float8_e4m3fn), scales[:2])
    fp4 = Fp4Weight(codes[:, :32].contiguous().view(torch.int8), scales)
    for weight in (fp8, fp4):
        for dtype in (torch.float32, torch.bfloat16):
            rows = weight.decoder(dtype, new_matrix)
            first = rows(0, 32)
            kept = first.clone()
            rows(32, 64)
            weight.decoder(dtype)(32, 64)
            assert_equal_bits(first, kept, f"{type(weight).__name__} rows")


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


def test_the_default_device_is_not_asked() -> None:
    """Models are often made on "meta" first; what is kept and every table would be of no use ever after."""
    expected = decoded(3, 64)
    for table in (number_formats._e2m1_byte_pairs, quantisers._activation_scales):
        table.cache_clear()
    scratch_module._KEPT.tensors.clear()
    x, codes = expected[1], expected[-2]
    with torch.device("meta"):
        inside = [e2m1_decode(codes), *quantize_activation(x), scratch(100, torch.int16, CPU)]
    assert not any(part.is_meta for part in inside)
    for found, wanted in zip(decoded(3, 64), expected, strict=True):
        assert_equal_bits(found, wanted, "afterwards")


def test_the_first_call_of_a_function_is_on_the_cpu_whatever_the_default_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = set[str]()
    monkeypatch.setattr(exact, "_FUNCTIONS", (lambda x: devices.add(x.device.type),))
    exact.warm_up.cache_clear()
    with torch.device("meta"):
        exact.warm_up()
    exact.warm_up.cache_clear()
    assert devices == {"cpu"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_default_dtype_is_not_asked(dtype: torch.dtype) -> None:
    def numbers() -> list[Tensor]:
        tiny = torch.zeros(32, 32, dtype=torch.uint8).view(torch.float8_e8m0fnu)  # 2^-127: nothing to FP16
        fp8 = Fp8Weight(torch.full((32, 32), 56, dtype=torch.uint8).view(torch.float8_e4m3fn), tiny[:1, :1])
        nobody = embedded_partial(torch.tensor([3]), torch.zeros(0, 8, dtype=torch.bfloat16), 0, 5)
        return [*decoded(4, 64), fp8.dequantize(), fp8.dequantize(torch.bfloat16), nobody]

    expected = numbers()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = numbers()
    finally:
        torch.set_default_dtype(before)
    for one, other in zip(found, expected, strict=True):
        assert_equal_bits(one, other, f"default {dtype}")


def test_threads_have_their_own() -> None:
    def place() -> int:
        return scratch(100, torch.float32, CPU).data_ptr()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(place).result() != place()
        assert pool.submit(place).result() == pool.submit(place).result()
