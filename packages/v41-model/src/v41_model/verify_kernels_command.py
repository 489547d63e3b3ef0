"""``v41-model verify-kernels``: every kernel executed and compared with its golden.

Variants for a device, which cannot be compared with anything here, are compiled and reported as not verified.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from dataclasses import asdict

from tqdm import tqdm

from v41_config import PRESETS
from v41_model.command_options import Subparsers
from v41_model.errors import OptionError
from v41_model.kernel_verification import (
    CaseResult,
    VerdictStore,
    default_store_directory,
    named_cases,
    source_digest,
    values_from,
    verify_case,
)
from v41_model.variant_reports import FAILED, VariantReport, report_variant

__all__ = ["add_verify_kernels_command"]

REFUSED = 1
"""Exit code when a kernel's result is not the golden's, or a variant does not compile."""


def add_verify_kernels_command(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "verify-kernels", help="execute kernels and compare them with their goldens; exit code 1 if one is refused"
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="operators (default: every one that has a kernel)")
    parser.add_argument(
        "--tier", choices=("graph", "passes"), help="values of the tensor graph (default on a CPU), or after all passes"
    )
    parser.add_argument(
        "--platform", default="cpu", help="cpu (default), or npu where CANN and an NPU are: no tier then"
    )
    parser.add_argument("--device-id", type=int, default=0, metavar="N", help="which NPU (default: %(default)s)")
    parser.add_argument(
        "--preset", choices=sorted(PRESETS), default="tiny", help="dimensions (default: %(default)s); flash is large"
    )
    parser.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS", help="of one launch")
    parser.add_argument("--no-cache", action="store_true", help="run what was accepted with the same sources before")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a line per case")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Verify the chosen operators.

    Errors: :class:`OptionError` without v41-kernels, :class:`OperatorError` for a name that has no kernel,
    ``v41_kernels.NoValuesError`` for a variant's, ``v41_kernels.PlatformError`` for what an NPU needs and is not there.
    """
    if importlib.util.find_spec("v41_kernels") is None:
        raise OptionError("verify-kernels", "no v41-kernels", "v41-model[pypto] to be installed")
    from v41_kernels import NOT_VERIFIED, OPERATORS, Executor, Tier, VariantCompiler, variants_of
    from v41_kernels.registry import find_kernel

    names = [find_kernel(name).spec.name for name in arguments.names or OPERATORS]
    tier = None if arguments.tier is None else Tier(arguments.tier)
    store = VerdictStore(default_store_directory(), source_digest())
    cases = [(n, *case) for n in names for case in named_cases(n, arguments.preset)]
    results: list[CaseResult] = []
    with (
        Executor(
            platform=arguments.platform, device_id=arguments.device_id, tier=tier, timeout=arguments.timeout
        ) as executor,
        tqdm(cases, unit="case", disable=not sys.stderr.isatty(), leave=False) as bar,
    ):
        kept = executor.tier is not None  # a device's verdict depends on more than sources
        for name, label, make in bar:
            bar.set_postfix_str(name)
            stored = None if arguments.no_cache or not kept else store.find(name, label, values_from(executor))
            result = stored or verify_case(executor, name, label, make)
            if kept:
                store.keep(result)
            results.append(result)
            if not arguments.json:
                bar.clear()
                print(_line(result, stored is not None), flush=True)
    variants: list[VariantReport] = []
    with VariantCompiler(timeout=arguments.timeout) as compiler:
        for variant in (variant for name in names for variant in variants_of(name)):
            variants.append(report_variant(compiler, variant, PRESETS[arguments.preset]))
            if not arguments.json:
                print(_variant_line(variants[-1]), flush=True)
    refused = [result for result in results if not result.accepted]
    failed = [report for report in variants if report.status == FAILED]
    if arguments.json:
        document = {
            "accepted": not refused and not failed,
            "cases": [asdict(result) for result in results],
            "variants": [asdict(report) for report in variants],
        }
        print(json.dumps(document, indent=1))
    else:
        where = executor.platform if executor.tier is None else f"tier {executor.tier.value}; CPU, no device"
        compiled = f"; {len(variants) - len(failed)} of {len(variants)} variants {NOT_VERIFIED}" if variants else ""
        print(f"{len(results) - len(refused)} of {len(results)} cases accepted ({where}){compiled}")
    return REFUSED if refused or failed else 0


def _line(result: CaseResult, stored: bool) -> str:
    how = "stored" if stored else f"{result.seconds:.2f} s"
    errors = "; ".join(f"{name}: {text}" for name, text in result.statistics.items())
    verdict = "accepted" if result.accepted else f"REFUSED {' | '.join(result.reasons)}"
    return f"{result.operator} [{result.case}, {result.tier}, {how}] {verdict}{': ' + errors if errors else ''}"


def _variant_line(report: VariantReport) -> str:
    """No verdict: nothing was compared."""
    status = report.status if report.reason is None else f"{report.status.upper()} {report.reason}"
    return f"{report.variant} [for the {report.device}, {report.seconds:.2f} s] {status}"
