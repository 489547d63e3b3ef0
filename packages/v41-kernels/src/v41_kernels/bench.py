"""Leaf benchmarks: what an operator costs to compile, and to interpret on a CPU or to run on an NPU, beside what a
device would need at least.

A time on a CPU says how long a judgement takes, nothing about a device. The roofline is arithmetic on public figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from v41_config import ModelConfig
from v41_kernels.bench_operands import bench_operands, bind_for_bench
from v41_kernels.devices import Device
from v41_kernels.executor import Executor, Measurement
from v41_kernels.operator_work import Work, operator_work
from v41_kernels.variant_compiler import VariantCompiler
from v41_kernels.variants import variants_of

_LARGEST_OPERANDS = 2 << 30
"""Bytes of operands that are still made and interpreted; the interpreter keeps several copies."""

EXECUTED = "executed"
"""The status of an operator whose kernels were compiled and run."""


@dataclass(frozen=True)
class BenchResult:
    """One operator: sums over its launches; `skipped` says why it was not run, and then only the work is known.

    `cpu_seconds` are those of interpretation, `device_seconds` those of a run on an NPU; the platform decides which.
    A variant is compiled and has no seconds of a run; its `status` says so.
    """

    operator: str
    rows: int
    launches: int
    bytes_moved: int
    matmul_flops: int
    intensity: float
    roofline_seconds: float | None
    device: str
    compile_seconds: float | None = None
    graph_operations: int | None = None
    cpu_seconds: float | None = None
    device_seconds: float | None = None
    cost_model_cycles: int | None = None
    skipped: str | None = None
    status: str = EXECUTED

    def as_json(self) -> dict[str, object]:
        """Stable keys; the cost model's cycles are "not covered" where it does not know an operation."""
        shown = asdict(self)
        if self.cost_model_cycles is None and self.cpu_seconds is not None:
            shown["cost_model_cycles"] = "not covered"
        return shown


def bench(
    executor: Executor, names: Sequence[str], config: ModelConfig, rows: int, device: Device
) -> Iterator[BenchResult]:
    """A result for each operator, in order, as it is there. Errors: those of `Executor.measure`."""
    for name in names:
        bound = bind_for_bench(name, config, rows)
        work = operator_work(bound)
        size = sum(tensor.nbytes for tensor in bound.tensors.values())
        result = _result(name, rows, work, device)
        if size > _LARGEST_OPERANDS:
            yield replace(result, skipped=f"operands of {size / 2**30:.1f} GiB", status="not run")
            continue
        launches = executor.measure(name, **bench_operands(bound))
        if len(launches) > 1:
            work = sum((_launched_work(launch, config) for launch in launches), Work(0, 0))
        run_seconds = sum(launch.run_seconds for launch in launches)
        covered = [launch.cycles for launch in launches if launch.cycles is not None]
        yield replace(
            _result(name, rows, work, device),
            launches=len(launches),
            compile_seconds=sum(launch.compile_seconds for launch in launches),
            graph_operations=sum(launch.operations for launch in launches),
            cpu_seconds=None if executor.tier is None else run_seconds,
            device_seconds=run_seconds if executor.tier is None else None,
            cost_model_cycles=sum(covered) if len(covered) == len(launches) else None,
        )


def bench_variants(
    compiler: VariantCompiler, names: Sequence[str], config: ModelConfig, rows: int, device: Device
) -> Iterator[BenchResult]:
    """A result for each variant of the operators, compiled and not run. Errors: those of `VariantCompiler.compile`."""
    for variant in (variant for name in names for variant in variants_of(name)):
        bound = bind_for_bench(variant.operator, config, rows)
        compiled = compiler.compile(variant.name, N=bound.dims["N"], K=bound.dims["K"])
        yield replace(
            _result(variant.name, rows, operator_work(bound), device),
            launches=len(variant.launches),
            compile_seconds=compiled.seconds,
            graph_operations=sum(compiled.operations.values()),
            status=compiled.status,
        )


def _launched_work(launch: Measurement, config: ModelConfig) -> Work:
    """The work of a launch, from its contract and the sizes it had."""
    extents = {symbol: launch.dims.get(symbol, 1) for symbol in launch.spec.given}
    return operator_work(launch.spec.bind(config, None, **extents))


def _result(name: str, rows: int, work: Work, device: Device) -> BenchResult:
    return BenchResult(
        name, rows, 1, work.bytes_moved, work.matmul_flops, work.intensity, device.roofline_seconds(work), device.name
    )


def as_line(result: BenchResult) -> str:
    """One line of a table."""
    roofline = "-" if result.roofline_seconds is None else f"{result.roofline_seconds * 1e6:.2f}"
    head = (
        f"{result.operator:40}{result.rows:6}{result.bytes_moved / 1e6:11.3f}{result.matmul_flops / 1e9:10.3f}"
        f"{result.intensity:9.2f}{roofline:>12}"
    )
    if result.skipped is not None:
        return f"{head}   not run: {result.skipped}"
    compiled = f"{head}{result.launches:9}{result.compile_seconds:10.2f}{result.graph_operations:9}"
    if result.status != EXECUTED:
        return f"{compiled}   {result.status}"
    if result.device_seconds is not None:
        share = "-" if result.roofline_seconds is None else f"{result.roofline_seconds / result.device_seconds:.1%}"
        return f"{compiled}{result.device_seconds * 1e6:11.1f}{share:>12}"
    cycles = "not covered" if result.cost_model_cycles is None else str(result.cost_model_cycles)
    return f"{compiled}{result.cpu_seconds:9.2f}{cycles:>13}"


def header(executor: Executor) -> str:
    """The line above those of a table."""
    ran = f"{'device us':>11}{'of roofline':>12}" if executor.tier is None else f"{'CPU s':>9}{'910B cycles':>13}"
    return (
        f"{'operator':40}{'rows':>6}{'MB moved':>11}{'GFLOP':>10}{'FLOP/B':>9}{'roofline us':>12}"
        f"{'launches':>9}{'compile s':>10}{'graph op':>9}{ran}"
    )
