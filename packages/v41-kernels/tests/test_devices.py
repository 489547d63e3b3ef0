"""Device descriptions are data with a source, and a roofline is the longer of two times."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from v41_kernels.devices import built_in_devices, find_device
from v41_kernels.errors import DeviceError
from v41_kernels.operator_work import Work


def described(**changes: Any) -> dict[str, Any]:
    device: dict[str, Any] = {
        "name": "mine",
        "title": "My card",
        "source": "its data sheet",
        "matmul_tflops": {"bf16": 100, "fp8": None, "fp4": None},
        "vector_fp16_tflops": None,
        "bandwidth_tb_s": 2,
        "memory_gb": 32,
    }
    return {**device, **changes}


def written(tmp_path: Path, entries: object) -> Path:
    file = tmp_path / "devices.json"
    file.write_text(json.dumps(entries))
    return file


def test_every_device_that_comes_along_has_a_source() -> None:
    devices = built_in_devices()
    assert {"ascend-950pr", "ascend-950dt", "ascend-910b2"} <= set(devices)
    assert all(device.source for device in devices.values())


def test_a_roofline_is_the_longer_of_products_and_bytes(tmp_path: Path) -> None:
    device = find_device("mine", written(tmp_path, [described()]))
    assert device.roofline_seconds(Work(bytes_moved=2 * 10**12, matmul_flops=10**12)) == 1.0
    assert device.roofline_seconds(Work(bytes_moved=0, matmul_flops=2 * 10**14)) == 2.0
    assert device.roofline_seconds(Work(bytes_moved=0, matmul_flops=0)) == 0.0


def test_no_roofline_without_a_published_figure(tmp_path: Path) -> None:
    file = written(tmp_path, [described(bandwidth_tb_s=None)])
    assert find_device("mine", file).roofline_seconds(Work(1, 1)) is None
    rates = {"bf16": None, "fp8": 1, "fp4": 1}
    file = written(tmp_path, [described(matmul_tflops=rates)])
    assert find_device("mine", file).roofline_seconds(Work(1, 1)) is None
    assert find_device("mine", file).roofline_seconds(Work(2 * 10**12, 0)) == 1.0


@pytest.mark.parametrize(
    ("entries", "where"),
    [
        ({}, "devices.json"),
        ([described(source="")], "source"),
        ([described(bandwidth_tb_s=0)], "bandwidth_tb_s"),
        ([described(bandwidth_tb_s=True)], "bandwidth_tb_s"),
        ([described(memory_gb="32")], "memory_gb"),
        ([described(matmul_tflops={"bf16": 1})], "matmul_tflops"),
        ([described(memory_gb=-1)], "memory_gb"),
        ([described(memory_gb=float("nan"))], "memory_gb"),
        ([described(memory_gb=float("inf"))], "memory_gb"),
        ([described(memory_gb=10**400)], "memory_gb"),
        ([described(), described()], r"\[1\].name: expected a name that no device before it has, found 'mine'"),
        ([{"name": "mine"}], r"\[0\]"),
        ([described(), {**described(name="x"), "more": 1}], r"\[1\]"),
    ],
)
def test_a_wrong_description_is_refused(tmp_path: Path, entries: object, where: str) -> None:
    with pytest.raises(DeviceError, match=where):
        find_device("mine", written(tmp_path, entries))


def test_a_device_or_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="ascend-950pr"):
        find_device("tpu")
    with pytest.raises(DeviceError, match="none"):
        find_device("mine", tmp_path / "none.json")
    broken = tmp_path / "broken.json"
    broken.write_text("[")
    with pytest.raises(DeviceError, match="JSON"):
        find_device("mine", broken)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "JSON in UTF-8"),
        (b"[" + b"1" * 5000 + b"]", "JSON in UTF-8"),
        (b"\xff\xfe\x00", "JSON in UTF-8"),
        ("[]".encode("utf-16"), "JSON in UTF-8"),
        (b"\xef\xbb\xbf[]", "JSON in UTF-8"),
        (b'[{"name": "mine", "name": "yours"}]', "name: expected it once, found the key twice"),
        (b" " * (2 << 20), "at most 1048576 bytes"),
    ],
)
def test_a_file_that_is_no_list_of_devices(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "devices.json").write_bytes(content)
    with pytest.raises(DeviceError, match=message):
        find_device("mine", tmp_path / "devices.json")


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    """From /dev/zero one could read for ever, and a pipe waits for somebody to write."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(DeviceError, match="expected a regular file"):
            find_device("mine", path)
