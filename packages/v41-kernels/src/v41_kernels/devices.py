"""Device descriptions for rooflines: public figures as data, each with its source. Nothing here was measured."""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from v41_config.json_keys import read_json
from v41_kernels.errors import DeviceError
from v41_kernels.operator_work import Work

_PRECISIONS = ("bf16", "fp8", "fp4")
_MAX_FILE_BYTES = 1 << 20
_LARGEST_FIGURE = 1e12
"""Far beyond any device, and far from where a time would become zero or infinite."""


@dataclass(frozen=True)
class Device:
    """One accelerator. TFLOP/s of dense products by operand format and TB/s of its memory; None is not published."""

    name: str
    title: str
    source: str
    matmul_tflops: Mapping[str, float | None]
    vector_fp16_tflops: float | None
    bandwidth_tb_s: float | None
    memory_gb: float | None

    def roofline_seconds(self, work: Work) -> float | None:
        """The longer of the time for the products and that for the bytes; None where a figure is not published.

        Products are taken at the BF16 rate: the kernels decode low-bit operands before they multiply.
        """
        products = self.matmul_tflops["bf16"]
        if self.bandwidth_tb_s is None or (work.matmul_flops and products is None):
            return None
        memory = work.bytes_moved / (self.bandwidth_tb_s * 1e12)
        return max(memory, work.matmul_flops / (products * 1e12) if products else 0.0)


def built_in_devices() -> dict[str, Device]:
    """The descriptions that come with this package, by name."""
    with importlib.resources.as_file(importlib.resources.files("v41_kernels").joinpath("devices.json")) as file:
        return {device.name: device for device in _devices(file)}


def known_devices(file: Path | None = None) -> dict[str, Device]:
    """Those that come along and those of a file in the same form, which replace others of their names.

    Errors: `DeviceError`.
    """
    known = built_in_devices()
    if file is not None:
        known |= {device.name: device for device in _devices(file)}
    return known


def find_device(name: str, file: Path | None = None) -> Device:
    """A device of `known_devices` by name.

    Errors: `DeviceError`.
    """
    known = known_devices(file)
    if name not in known:
        raise DeviceError("device", name, f"one of {', '.join(sorted(known))}")
    return known[name]


def _devices(file: Path) -> list[Device]:
    entries = read_json(file, _MAX_FILE_BYTES, "file of devices", DeviceError)
    if not isinstance(entries, list):
        raise DeviceError(str(file), type(entries).__name__, "a list of devices")
    devices = [_device(f"{file}[{number}]", entry) for number, entry in enumerate(entries)]
    for number, device in enumerate(devices):
        if any(device.name == other.name for other in devices[:number]):
            raise DeviceError(f"{file}[{number}].name", device.name, "a name that no device before it has")
    return devices


def _device(where: str, entry: object) -> Device:
    fields = set(Device.__dataclass_fields__)
    if not isinstance(entry, dict) or set(entry) != fields:
        found = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        raise DeviceError(where, found, f"an object with exactly {', '.join(sorted(fields))}")
    for field in ("name", "title", "source"):
        if not isinstance(entry[field], str) or not entry[field]:
            raise DeviceError(f"{where}.{field}", entry[field], "a text; a figure without its source is of no use")
    rates = entry["matmul_tflops"]
    if not isinstance(rates, dict) or set(rates) != set(_PRECISIONS):
        raise DeviceError(f"{where}.matmul_tflops", rates, f"a number or null for each of {', '.join(_PRECISIONS)}")
    numbers = {f"matmul_tflops.{name}": value for name, value in rates.items()}
    numbers |= {name: entry[name] for name in ("vector_fp16_tflops", "bandwidth_tb_s", "memory_gb")}
    for name, value in numbers.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _LARGEST_FIGURE:
            raise DeviceError(f"{where}.{name}", value, "a positive number, or null where none is published")
    return Device(**entry)
