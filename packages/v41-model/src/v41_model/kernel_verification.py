"""Kernels against their goldens: which cases an operator is judged on, and the verdicts, kept by source digest."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ConfigDict, TypeAdapter, ValidationError

from v41_config import PRESETS, ModelConfig, OperatorError, ParallelLayout
from v41_config.bounded_file import read_bounded
from v41_config.user_cache import user_cache_directory
from v41_config.validation_words import first_refusal
from v41_goldens.fixtures import FixtureCase
from v41_goldens.fixtures.batch import Phase
from v41_model.atomic_file import atomic_file
from v41_model.errors import CacheError, OutputError
from v41_model.kernel_cases import HARD_CASES, KernelCase, fixture_case, hard_case, judge, judged_config, layout_of

if TYPE_CHECKING:
    from v41_kernels import Executor

__all__ = ["CaseResult", "VerdictStore", "named_cases", "source_digest", "values_from", "verify_case"]

NamedCase = tuple[str, Callable[[], KernelCase]]

SMALL_EXTENTS = ((0, 0), (5, 0), (1, 1), (13, 11), (17, 17))
"""Rows, and those in use, of the hard cases: nothing, nothing in use, one, a ragged tile with padding, whole tiles."""

WIDE_EXTENTS = ((3, 2),)
"""The same where the dimensions are the released model's."""


@dataclass(frozen=True)
class CaseResult:
    """One case of one operator: accepted, or the reasons why not; statistics of each destination.

    `tier` is what the values come from: a tier's name, or the device's (`npu:0`).
    """

    operator: str
    case: str
    tier: str
    accepted: bool
    seconds: float
    statistics: dict[str, str]
    reasons: tuple[str, ...] = ()


def named_cases(name: str, preset: str) -> list[NamedCase]:
    """The cases of an operator at a preset's dimensions, each with a name and made when it is called for.

    Of large dimensions some operators are judged on a share: see `layout_of` and `judged_config`.
    """
    config = judged_config(name, PRESETS[preset])
    small = preset.startswith("tiny")
    rows, active = (13, 11) if small else (2, 1) if name == "moe" else (3, 2)
    phase: Phase = "decode" if name.startswith("decode_") else "prefill"
    layout, requests = layout_of(name, config), min(active, 3)
    fixture = FixtureCase(config, layout, phase=phase, tokens=rows, active_tokens=active, requests=requests)
    of = ", ".join([preset, *_share(PRESETS[preset], config, layout)])
    cases: list[NamedCase] = [(f"fixture {active}/{rows} {of}", lambda: fixture_case(name, fixture))]
    if name in HARD_CASES:
        for total, used in SMALL_EXTENTS if small else WIDE_EXTENTS:
            cases.append((f"hard {used}/{total} {of}", _hard(name, config, total, used)))
    return cases


def _share(whole: ModelConfig, config: ModelConfig, layout: ParallelLayout) -> list[str]:
    """In words, what of a model its cases have, where that is not all."""
    counts = {"heads": "num_attention_heads", "experts": "n_routed_experts"}
    fewer = [f"{getattr(config, field)} {name}" for name, field in counts.items()
             if getattr(config, field) != getattr(whole, field)]  # fmt: skip
    return fewer + ([f"rank {layout.world_size - 1} of {layout.world_size}"] if layout.world_size > 1 else [])


def _hard(name: str, config: ModelConfig, rows: int, active: int) -> Callable[[], KernelCase]:
    return lambda: hard_case(name, config, rows, active)


def values_from(executor: Executor) -> str:
    """What an executor's values come from: its tier's name, or its device's."""
    return executor.platform if executor.tier is None else executor.tier.value


def verify_case(executor: Executor, name: str, label: str, make: Callable[[], KernelCase]) -> CaseResult:
    """Runs a kernel on a case and judges it; a kernel that fails is a refusal with the failure as its reason.

    Errors: what stands in the way of every kernel, such as an interpreter that cannot be built.
    """
    from v41_kernels.errors import KernelExecutionError

    case = make()
    started = time.perf_counter()
    try:
        executor.run(name, **case.arguments)
    except (KernelExecutionError, OperatorError) as error:
        seconds = time.perf_counter() - started
        failure = f"{type(error).__name__}: {error}"
        return CaseResult(name, label, values_from(executor), False, seconds, {}, (failure,))
    seconds = time.perf_counter() - started
    verdicts = judge(case)
    reasons = tuple(
        f"{destination}: {reason}"
        for destination, verdict in verdicts.items()
        if not verdict.accepted
        for reason in verdict.reasons
    )
    statistics = {destination: verdict.statistics for destination, verdict in verdicts.items()}
    return CaseResult(name, label, values_from(executor), not reasons, seconds, statistics, reasons)


def source_digest(packages: Sequence[str] = ("v41_config", "v41_goldens", "v41_kernels")) -> str:
    """SHA-256 of the sources of some packages, of this module and its cases, and of what runs them."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    files = [here / "kernel_cases.py", here / "kernel_verification.py"]
    for package in packages:
        spec = importlib.util.find_spec(package)
        assert spec is not None, package
        for location in spec.submodule_search_locations or ():
            files += sorted(Path(location).rglob("*.py"))
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    for distribution in ("pypto", "torch"):
        try:
            digest.update(version(distribution).encode() + b"\0")
        except PackageNotFoundError:
            digest.update(b"none\0")
    return digest.hexdigest()


_RESULTS: TypeAdapter[list[CaseResult]] = TypeAdapter(list[CaseResult], config=ConfigDict(strict=True))
_MAX_STORE_BYTES = 64 << 20
_REMOVE = "it can be removed, and cases run again"


class VerdictStore:
    """Accepted cases of one source digest, in a file of the user's cache directory. Refusals are never kept."""

    def __init__(self, directory: Path, digest: str) -> None:
        """Reads what is there. Errors: :class:`CacheError` for a file that no store has written."""
        self._file = directory / f"{digest[:32]}.json"
        self._results: dict[str, CaseResult] = {}
        if not self._file.exists():
            return
        try:
            entries = _RESULTS.validate_json(read_bounded(self._file, _MAX_STORE_BYTES, "file of verdicts", CacheError))
        except ValidationError as error:
            where, found, expected = first_refusal(error, "the file")
            raise CacheError(f"{self._file}: {where}", found, f"{expected}; {_REMOVE}") from None
        for result in entries:
            if not result.accepted:
                raise CacheError(f"{self._file}: {result.operator}", "a refusal", f"what was accepted; {_REMOVE}")
            self._results[self._key(result.operator, result.case, result.tier)] = result

    def find(self, name: str, label: str, tier: str) -> CaseResult | None:
        """The stored result of a case."""
        return self._results.get(self._key(name, label, tier))

    def keep(self, result: CaseResult) -> None:
        """Store a result, at once, so that an interrupted run goes on where it was.

        Errors: :class:`OutputError` for a cache directory that cannot be written.
        """
        if not result.accepted:
            return
        self._results[self._key(result.operator, result.case, result.tier)] = result
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            expected = "a cache directory that can be written: XDG_CACHE_HOME names another"
            raise OutputError(str(self._file.parent), str(error), expected) from error
        with atomic_file(self._file) as file:
            file.write_text(json.dumps([asdict(entry) for entry in self._results.values()]), encoding="utf-8")

    @staticmethod
    def _key(name: str, label: str, tier: str) -> str:
        return f"{name}\n{label}\n{tier}"

    def __iter__(self) -> Iterator[CaseResult]:
        return iter(self._results.values())


def default_store_directory() -> Path:
    """Where accepted cases are kept (see `user_cache_directory`)."""
    return user_cache_directory("v41-model") / "verified-kernels"
