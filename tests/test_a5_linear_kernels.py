"""What can be judged of the A5's linears: all of their quantiser, and the product's rows, columns and sums.

The quantiser's bytes are the golden's. The product's scales cannot be judged, since the interpreter ignores them; with
scales of one that does no harm, and the product is the plain one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from v41_config import FLASH, MX_GROUP, TINY
from v41_goldens.quantisers import Quantized, quantize_activation
from v41_kernels import Executor, Tier, find_pypto
from v41_kernels.calculator import calculator_library, default_cache_directory
from v41_kernels.pypto_for_a5 import pypto_for_a5
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


# Small integers, so that every sum is exact in FP32; rows behind the active ones stay as they were. Two tiles of rows,
# the second one ragged; three tiles of outputs, and of inputs more than one.
PRODUCT_WITHOUT_SCALES = """
import sys
from pathlib import Path
import torch
from v41_kernels import Tier
from v41_kernels.interpreter import Interpreter
from v41_kernels.kernels.quantized_linear_a5 import make_entry

calculator, scratch, scale_code, wrong_input = sys.argv[1:]
rows, active, N, K = 75, 70, 96, 320
interpreter = Interpreter(Path(calculator), Path(scratch))
interpreter.hand_over_tensors()

def integers(*shape):
    return torch.randint(-8, 9, shape).float()

def scales(*shape):
    return torch.full(shape, int(scale_code), dtype=torch.uint8).view(torch.float8_e8m0fnu)

codes, w = integers(rows, K), integers(N, K)
tensors = {
    "codes": codes.to(torch.float8_e4m3fn), "scale": scales(rows, K // 64, 2),
    "w": w.to(torch.float8_e4m3fn), "w_scale": scales(N // 32, K // 32),
    "num_tokens": torch.tensor([active], dtype=torch.int32), "out": torch.full((rows, N), -7.0),
}
interpreter.run("product", make_entry(N=N, K=K, exact_type="DT_FP32"), tensors, ["out"], Tier.GRAPH)
w[90, 300] += int(wrong_input)
expected = codes @ w.T
expected[active:] = -7.0
wrong = int((tensors["out"] != expected).sum())
sys.exit(f"{wrong} of {expected.numel()} are wrong" if wrong else 0)
"""


def run_product(directory: Path, scale_code: int, wrong_input: bool = False) -> subprocess.CompletedProcess[str]:
    pypto, cache = find_pypto(), default_cache_directory()
    environment = {
        **os.environ,
        "PYTHONPATH": str(pypto_for_a5(pypto, cache)),
        "HOME": str(directory),
        "ASCEND_PROCESS_LOG_PATH": str(directory / "log"),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    arguments = [str(calculator_library(pypto, cache)), str(directory), str(scale_code), str(int(wrong_input))]
    command = [sys.executable, "-c", PRODUCT_WITHOUT_SCALES, *arguments]
    return subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, check=False)


@pytest.mark.kernels
@pytest.mark.parametrize("scale_code", [127, 130], ids=["scales of 1", "scales of 8"])
def test_without_scales_the_product_is_the_plain_one(tmp_path: Path, scale_code: int) -> None:
    """That scales of 8 make no difference is why the variants are not verified: if this fails, they can be."""
    done = run_product(tmp_path, scale_code)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.kernels
def test_one_wrong_input_of_the_product_is_seen(tmp_path: Path) -> None:
    done = run_product(tmp_path, 127, wrong_input=True)
    assert done.returncode == 1
    assert "of 7200 are wrong" in done.stderr
