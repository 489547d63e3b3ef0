"""What is listed works: each operator has a kernel whose entry has the contract's signature, and a test of its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import v41_kernels
from v41_config import operators
from v41_config.operator_spec import CountSpec
from v41_kernels import OPERATORS
from v41_kernels.registry import STAGES

PYPTO_TYPES = {
    "bfloat16": "DT_BF16",
    "float32": "DT_FP32",
    "int32": "DT_INT32",
    "int64": "DT_INT32",  # a pair of them
    "bool": ("DT_BOOL", "DT_INT8"),
    "float8_e4m3fn": "DT_INT8",
    "float8_e8m0fnu": "DT_INT8",
    "int8": "DT_INT8",
    "uint8": "DT_INT8",
}
"""How an entry declares the contract's element types: codes are bytes."""

KERNELS = Path(v41_kernels.__file__).parent / "kernels"
SINGLE = {**{n: o for n, o in OPERATORS.items() if o.composition is None}, **STAGES}
SHARED = {"quantized_linear_fp32": "quantized_linear", "fp32_linear": "bf16_linear"}
"""Modules whose entry is another module's, for another type of result."""


TRANSPORTS = ("dispatch", "return_to_source", "tp_logits_all_gather", "prefill_tp_", "decode_tp_")
"""Operators that move rows between ranks."""


def entry_types(source: str) -> dict[str, str]:
    """Dtype of every parameter of the one jit entry, as written."""
    tree = ast.parse(source)
    (maker,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "make_entry")
    (entry,) = (node for node in maker.body if isinstance(node, ast.FunctionDef))
    types = {}
    for argument in entry.args.args:
        assert isinstance(argument.annotation, ast.Call)
        types[argument.arg] = ast.unparse(argument.annotation.args[1]).removeprefix("pypto.")
    return types


@pytest.mark.parametrize("name", SINGLE)
def test_the_entry_has_the_contracts_signature(name: str) -> None:
    """Names and types; sizes are checked where a call's bytes are mapped (`test_executor`)."""
    operator = SINGLE[name]
    assert operator.spec.name == name
    module = operator.kernel.rsplit(".", 1)[-1]
    types = entry_types((KERNELS / f"{SHARED.get(module, module)}.py").read_text())
    contract = {operator.names.get(parameter, parameter): kind for parameter, kind in types.items()}
    counts = [scalar.name for scalar in operator.spec.scalars if isinstance(scalar, CountSpec)]
    assert set(contract) == {tensor.name for tensor in operator.spec.tensors} | set(counts)
    assert all(contract[count] == "DT_INT32" for count in counts)
    for tensor in operator.spec.tensors:
        if contract[tensor.name] != "result":  # chosen by the module that shares the entry
            assert contract[tensor.name] in PYPTO_TYPES[tensor.dtype], tensor.name


def test_every_operator_but_the_transports_has_a_kernel() -> None:
    transports = {name for name in operators() if name.startswith(TRANSPORTS)}
    assert set(OPERATORS) == set(operators()) - transports


def test_a_stage_of_compositions_has_a_name_of_its_own() -> None:
    assert not set(STAGES) & set(operators())


def test_the_founding_operators_are_listed() -> None:
    assert set(OPERATORS) >= {"rms_norm", "materialize_rope_rows", "mhc_post"}


def test_the_list_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        OPERATORS["softmax"] = OPERATORS["rms_norm"]  # type: ignore[index]
