"""Every kernel through pypto's own launch for an NPU, as far as that goes without one.

torch knows a device here whose memory is the host's, and programs that compile nothing stand for CANN's compiler. So
this shows that the launch takes our tensors and that all kernels become device code, and nothing about what they do.
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
from torch.utils.cpp_extension import include_paths, library_paths

from v41_config import TINY
from v41_kernels import OPERATORS, CanaryError, Executor
from v41_kernels.bench_operands import bench_operands, bind_for_bench
from v41_kernels.calculator import cxx_standard

STAND_IN = Path(__file__).parent / "stand_in_npu"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pypto has wheels for Linux only"),
]


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a machine whose parts are all there, by name."""
    directory = tmp_path_factory.mktemp("registered")
    command = ["g++", f"-std=c++{cxx_standard(torch.__version__)}", "-w", "-shared", "-fPIC"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    command += [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
    command += [str(STAND_IN / "device.cpp"), "-ltorch_cpu", "-lc10", "-o", str(directory / "device.so")]
    subprocess.run(command, check=True, capture_output=True, text=True)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("STAND_IN_NPU", str(directory))
        environment.setenv("ASCEND_HOME_PATH", str(STAND_IN))
        environment.setenv("PATH", str(STAND_IN / "bin"), prepend=os.pathsep)
        environment.setenv("PYTHONPATH", str(STAND_IN), prepend=os.pathsep)
        environment.syspath_prepend(str(STAND_IN))
        yield directory


def test_a_launch_that_does_nothing_is_noticed(registered: Path) -> None:
    """pypto says nothing about it; the canary does."""
    with pytest.raises(CanaryError, match="nan"):
        Executor(platform="npu")
    assert "--cce-aicore-arch=dav-c220-vec" in (registered / "compiler.log").read_text()


@pytest.fixture(scope="module")
def device(registered: Path) -> Iterator[Executor]:
    (registered / "no-canary").touch()
    with Executor(platform="npu", timeout=300.0) as started:
        yield started


@pytest.mark.parametrize("rows", [3, 0])
@pytest.mark.parametrize("name", [name for name, operator in OPERATORS.items() if operator.composition is None])
def test_a_kernel_becomes_device_code_and_its_tensors_are_taken(
    device: Executor, registered: Path, name: str, rows: int
) -> None:
    """And destinations, which nothing writes, come back as they went."""
    log = registered / "compiler.log"
    log.write_text("")
    bound = bind_for_bench(name, TINY, rows)
    arguments = bench_operands(bound)
    destinations = [arguments[destination] for destination in bound.spec.destinations]
    sent = [tensor.clone() for tensor in destinations if isinstance(tensor, Tensor)]
    device.run(name, **arguments)
    for tensor, before in zip(destinations, sent, strict=True):
        assert isinstance(tensor, Tensor)
        assert torch.equal(tensor.view(torch.uint8), before.view(torch.uint8))
    if rows == 3 and name not in {"hc_head", "lm_head", "o_proj"}:  # those have their entry from another operator
        compiled = log.read_text()
        assert "dav-c220-vec" in compiled
        assert "dav-c220-cube" in compiled


def test_a_compiled_kernel_takes_any_number_of_rows(device: Executor, registered: Path) -> None:
    device.run("rms_norm", **bench_operands(bind_for_bench("rms_norm", TINY, 5)))
    (registered / "compiler.log").write_text("")
    for rows in (9, 1, 0):
        device.run("rms_norm", **bench_operands(bind_for_bench("rms_norm", TINY, rows)))
    assert (registered / "compiler.log").read_text() == ""
