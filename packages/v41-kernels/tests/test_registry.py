"""What is listed works: each operator has a kernel whose entry has the contract's signature, and a test of its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import v41_kernels
from v41_config.operator_spec import CountSpec
from v41_kernels import OPERATORS

PYPTO_TYPES = {"bfloat16": "DT_BF16", "float32": "DT_FP32", "int32": "DT_INT32"}
KERNELS = Path(v41_kernels.__file__).parent / "kernels"


def entry_signature(source: str, name: str) -> dict[str, tuple[list[str], str]]:
    """Dimensions and dtype of every parameter of the jit entry, as written."""
    entries = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == name]
    assert len(entries) == 1
    signature = {}
    for argument in entries[0].args.args:
        assert isinstance(argument.annotation, ast.Call)
        dims, dtype = argument.annotation.args
        assert isinstance(dims, ast.List)
        signature[argument.arg] = ([ast.unparse(dim) for dim in dims.elts], ast.unparse(dtype))
    return signature


@pytest.mark.parametrize("name", OPERATORS)
def test_the_entry_has_the_contracts_signature(name: str) -> None:
    spec = OPERATORS[name].spec
    assert spec.name == name
    wanted = {
        tensor.name: (
            ["pypto.DYNAMIC" if dim in spec.given else str(dim) for dim in tensor.dims],
            f"pypto.{PYPTO_TYPES[tensor.dtype]}",
        )
        for tensor in spec.tensors
    } | {scalar.name: (["1"], "pypto.DT_INT32") for scalar in spec.scalars if isinstance(scalar, CountSpec)}
    assert entry_signature((KERNELS / f"{name}.py").read_text(), name) == wanted


def test_the_founding_operators_are_listed() -> None:
    assert set(OPERATORS) >= {"rms_norm", "materialize_rope_rows", "mhc_post"}


def test_the_list_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        OPERATORS["softmax"] = OPERATORS["rms_norm"]  # type: ignore[index]
