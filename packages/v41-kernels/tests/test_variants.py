"""Variants for the A5: compiled for that architecture, reported as not verified, and never run."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from v41_config import OperatorError
from v41_kernels import (
    OPERATORS,
    VARIANTS,
    CompiledVariant,
    Executor,
    KernelExecutionError,
    NoValuesError,
    Variant,
    VariantCompiler,
    find_pypto,
    variants_of,
)
from v41_kernels.cli import main
from v41_kernels.platforms import Platform
from v41_kernels.provider import KernelProvider
from v41_kernels.pypto_for_a5 import package_digest
from v41_kernels.variants import Launch
from v41_kernels.worker_process import WorkerProcess

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pypto has wheels for Linux only")

N, K = 96, 320  # no multiple of a tile in either direction
PRODUCT = "v41_kernels.kernels.quantized_linear_a5"
STATUS = "compiled, not verified"
MX_OPERATIONS = {"L1_COPY_IN_A_SCALE", "L1_COPY_IN_B_SCALE", "L1_TO_L0A_SCALE", "L1_TO_L0B_SCALE"}
"""Moves of scales towards the product, which there are on this architecture alone."""

# FP8 rows with FP4 weights: the reason why `quantized_linear_fp4` has no variant.
MIXED_PRODUCT = """
import pypto

def make_entry(*, N, K):
    def mixed_product(
        codes: pypto.Tensor([32, 128], pypto.DT_FP8E4M3),
        scale: pypto.Tensor([32, 2, 2], pypto.DT_FP8E8M0),
        w: pypto.Tensor([64, 128], pypto.DT_FP4_E2M1X2),
        w_scale: pypto.Tensor([64, 2, 2], pypto.DT_FP8E8M0),
        out: pypto.Tensor([32, 64], pypto.DT_FP32),
    ):
        pypto.set_cube_tile_shapes([32, 32], [128, 128], [64, 64])
        out[:] = pypto.scaled_mm(codes, w, pypto.DT_FP32, scale, w_scale, b_trans=True, scale_b_trans=True)

    return mixed_product
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where workers find a kernel that does not compile."""
    directory = tmp_path_factory.mktemp("kernels")
    (directory / "mixed_product.py").write_text(MIXED_PRODUCT)
    return directory


@pytest.fixture(scope="module")
def compiler(directory: Path) -> Iterator[VariantCompiler]:
    """One worker for as long as nothing fails in it."""
    mixed = Variant("mixed", "quantized_linear_fp4", (Launch("mixed_product"),))
    with pytest.MonkeyPatch.context() as patch, VariantCompiler(variants={**VARIANTS, "mixed": mixed}) as compiler:
        patch.setenv("PYTHONPATH", str(directory))
        yield compiler


@pytest.fixture(scope="module")
def compiled(compiler: VariantCompiler) -> dict[str, CompiledVariant]:
    before = package_digest(find_pypto())
    compiled = {name: compiler.compile(name, N=N, K=K) for name in VARIANTS}
    assert package_digest(find_pypto()) == before, "the installed pypto was changed"
    return compiled


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_compiles_for_the_a5(compiled: dict[str, CompiledVariant], name: str) -> None:
    result = compiled[name]
    assert result.architecture == "DAV_3510"
    assert set(result.operations) >= MX_OPERATIONS
    assert result.seconds > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_known_of_a_variant_are_no_values(compiled: dict[str, CompiledVariant], name: str) -> None:
    result = compiled[name]
    assert result.status == STATUS
    assert not any(isinstance(value, torch.Tensor) for value in vars(result).values())
    with pytest.raises(TypeError):
        CompiledVariant(name, "quantized_linear", "DAV_3510", 1.0, {}, status="accepted")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="status"):
        dataclasses.replace(result, status="accepted")


def test_a_variant_that_does_not_compile_is_an_error(compiler: VariantCompiler) -> None:
    with pytest.raises(KernelExecutionError, match="Non-FP8 inputs require identical dtypes") as caught:
        compiler.compile("mixed", N=N, K=K)
    assert caught.value.where == "variant mixed, mixed_product (for the A5)"
    assert caught.value.expected == "a kernel that compiles"


def test_the_installed_pypto_refuses_the_product() -> None:
    """So what compiled above was compiled for another architecture than that of every other kernel."""
    worker = WorkerProcess(Platform("cpu"), None, find_pypto().package.parent)
    with pytest.raises(KernelExecutionError, match="only DAV_3510 architecture is supported"):
        worker.ask("product", {"where": "product", "kernel": PRODUCT, "static": {"N": N, "K": K}}, 120.0)


def test_another_architecture_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = VariantCompiler()
    answer = {"seconds": 1.0, "operations": {}, "architecture": "DAV_2201"}
    monkeypatch.setattr(compiler, "_ask", lambda where, request: answer)
    with pytest.raises(KernelExecutionError, match="compiled for DAV_2201"):
        compiler.compile("quantized_linear_a5", N=N, K=K)


@pytest.mark.parametrize(
    ("name", "n", "k", "said"),
    [
        ("quantized_linear_a5", 33, 64, "w_scale"),
        ("quantized_linear_a5", 32, 96, "64"),
        ("rms_norm", 32, 64, "_a5"),
        ("quantized_linear_a5", 0, 64, "N: expected outputs"),
        ("quantized_linear_a5", 32, 0, "K: expected a multiple"),
    ],
)
def test_what_cannot_be_compiled(name: str, n: int, k: int, said: str) -> None:
    with pytest.raises(OperatorError, match=said):
        VariantCompiler().compile(name, N=n, K=k)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_request_for_values_is_refused(name: str) -> None:
    arguments = {"x": torch.zeros(1, K).bfloat16(), "out": torch.zeros(1, N).bfloat16()}
    with Executor() as executor:
        for ask in (executor.run, executor.measure):
            with pytest.raises(NoValuesError, match=STATUS) as caught:
                ask(name, **arguments)
            assert caught.value.where == name
            assert VARIANTS[name].operator in str(caught.value.expected)
    provider = KernelProvider()
    assert name not in provider.names()
    with pytest.raises(NoValuesError, match=STATUS):
        provider.run(name, arguments)


def test_a_variant_is_no_operator_and_belongs_to_one() -> None:
    assert not set(VARIANTS) & set(OPERATORS)
    for name, variant in VARIANTS.items():
        assert variant.name == name
        assert variant in variants_of(variant.operator)
    assert variants_of("rms_norm") == ()


def test_list_names_variants_with_their_operator(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert list(lines) == list(OPERATORS)
    for operator, line in lines.items():
        variants = [variant.name for variant in variants_of(operator)]
        assert (STATUS in line) == bool(variants)
        assert all(name in line for name in variants)
    assert main(["list", "--json"]) == 0
    listed = {entry["operator"]: entry["variants"] for entry in json.loads(capsys.readouterr().out)}
    assert listed["quantized_linear"] == ["quantized_linear_a5"]
    assert listed["rms_norm"] == []


def test_bench_gives_a_variant_no_seconds_of_a_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, compiled: dict[str, CompiledVariant]
) -> None:
    monkeypatch.setattr(VariantCompiler, "compile", lambda self, name, **sizes: compiled[name])
    monkeypatch.setattr("v41_kernels.bench.bench", lambda *_: iter(()))
    for form in ([], ["--json"]):
        assert main(["bench", "quantized_linear", "rms_norm", "--preset", "tiny", *form]) == 0
    table, _, document = capsys.readouterr().out.partition("{")
    (line,) = (line for line in table.splitlines() if "_a5" in line)
    assert line.startswith("quantized_linear_a5 ")
    assert line.endswith(f" {STATUS}")
    (result,) = json.loads("{" + document)["operators"]
    assert result["operator"] == "quantized_linear_a5"
    assert result["status"] == STATUS
    assert result["compile_seconds"] == compiled["quantized_linear_a5"].seconds
    assert result["cpu_seconds"] is None
    assert result["cost_model_cycles"] is None


def test_bench_of_a_variant_that_does_not_compile_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: VariantCompiler, name: str, **sizes: int) -> CompiledVariant:
        raise KernelExecutionError(f"variant {name}", "a reason", "a kernel that compiles")

    monkeypatch.setattr(VariantCompiler, "compile", refuse)
    monkeypatch.setattr("v41_kernels.bench.bench", lambda *_: iter(()))
    assert main(["bench", "quantized_linear", "--preset", "tiny"]) == 2
    assert "a reason" in capsys.readouterr().err
