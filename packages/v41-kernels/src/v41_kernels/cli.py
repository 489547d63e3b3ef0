"""`v41-kernels`: list the operators that have a kernel, time them, describe devices."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from v41_config import PRESETS
from v41_config.command_line import run_command
from v41_kernels.devices import find_device, known_devices
from v41_kernels.registry import OPERATORS, find_kernel
from v41_kernels.tiers import Tier
from v41_kernels.variants import NOT_VERIFIED, variants_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 on success, 2 with one line on standard error for bad input or a kernel that fails."""
    arguments = _parser().parse_args(argv)
    return run_command("v41-kernels", lambda: arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="v41-kernels", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    listing = commands.add_parser("list", help="one operator a line: its name, and how it is made up")
    listing.add_argument("--json", action="store_true")
    listing.set_defaults(run=_list)

    timing = commands.add_parser("bench", help="compile operators, interpret or run them; roofline of a device")
    timing.add_argument("names", nargs="*", metavar="NAME", help="default: every operator")
    timing.add_argument(
        "--preset", choices=sorted(PRESETS), default="flash6",
        help="dimensions; default: %(default)s, the released model's with 8 experts and a small vocabulary",
    )  # fmt: skip
    timing.add_argument("--rows", type=_positive, default=4, help="tokens; default: %(default)s")
    timing.add_argument("--tier", choices=[tier.value for tier in Tier], help="of interpretation; default: graph")
    timing.add_argument(
        "--device", default="ascend-950pr", metavar="NAME", help="of the roofline; default: %(default)s"
    )
    timing.add_argument("--devices", type=Path, metavar="FILE.json", help="further devices, as `v41-kernels devices`")
    timing.add_argument(
        "--platform", default="cpu", help="default: %(default)s, which interprets; npu times runs where one is"
    )
    timing.add_argument("--device-id", type=int, default=0, metavar="N", help="which NPU; default: %(default)s")
    timing.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS", help="of one launch")
    timing.add_argument("--json", action="store_true")
    timing.set_defaults(run=_bench)

    devices = commands.add_parser("devices", help="the device descriptions with their sources, as JSON")
    devices.add_argument("--devices", type=Path, metavar="FILE.json", help="further ones, in the form that this prints")
    devices.set_defaults(run=_devices)
    return parser


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 999999999, found {text[:40]!r}")
    return int(text)


def _list(arguments: argparse.Namespace) -> None:
    kinds = {
        name: "launches of several kernels" if operator.composition is not None else operator.kernel.rsplit(".", 1)[-1]
        for name, operator in OPERATORS.items()
    }
    if arguments.json:
        listed = [
            {"operator": name, "kernel": kind, "variants": [variant.name for variant in variants_of(name)]}
            for name, kind in kinds.items()
        ]
        print(json.dumps(listed, indent=1))
        return
    for name, kind in kinds.items():
        variants = [f"{variant.name} for the {variant.device} ({NOT_VERIFIED})" for variant in variants_of(name)]
        print(f"{name:40}{'; '.join([kind, *variants])}")


def _bench(arguments: argparse.Namespace) -> None:
    from tqdm import tqdm

    from v41_kernels.bench import as_line, bench, bench_variants, header
    from v41_kernels.executor import Executor
    from v41_kernels.variant_compiler import VariantCompiler

    names = arguments.names or list(OPERATORS)
    for name in names:
        find_kernel(name)
    device = find_device(arguments.device, arguments.devices)
    config, tier = PRESETS[arguments.preset], None if arguments.tier is None else Tier(arguments.tier)
    results = []
    with (
        Executor(
            platform=arguments.platform, device_id=arguments.device_id, tier=tier, timeout=arguments.timeout
        ) as executor,
        VariantCompiler(timeout=arguments.timeout) as compiler,
    ):
        if not arguments.json:
            ran = executor.platform if executor.tier is None else f"tier {executor.tier.value}"
            print(f"{device.title}: {device.source}; {arguments.preset}, {ran}\n{header(executor)}", flush=True)
        total = len(names) + sum(len(variants_of(name)) for name in names)
        with tqdm(total=total, unit="operator", disable=not sys.stderr.isatty(), leave=False) as bar:
            for result in itertools.chain(
                bench(executor, names, config, arguments.rows, device),
                bench_variants(compiler, names, config, arguments.rows, device),
            ):
                results.append(result.as_json())
                bar.update()
                if not arguments.json:
                    bar.clear()
                    print(as_line(result), flush=True)
    if arguments.json:
        about = {
            "device": device.name, "source": device.source, "preset": arguments.preset, "platform": executor.platform,
            "tier": None if executor.tier is None else executor.tier.value,
        }  # fmt: skip
        print(json.dumps({**about, "operators": results}, indent=1))


def _devices(arguments: argparse.Namespace) -> None:
    known = known_devices(arguments.devices)
    shown = [{**vars(device), "matmul_tflops": dict(device.matmul_tflops)} for device in known.values()]
    print(json.dumps(shown, indent=1))
