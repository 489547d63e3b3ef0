"""All arithmetic is inside the kernels: read from the syntax trees of the sources."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import v41_kernels

SOURCE = Path(v41_kernels.__file__).parent
KERNELS = sorted(path for path in (SOURCE / "kernels").rglob("*.py") if path.name != "__init__.py")
HOST_MODULES = sorted(SOURCE.glob("*.py"))

SHARED_PACKAGE = "v41_kernels.kernels"
"""Where stages come from that several kernels use."""

# What code around a kernel may use of torch: types, versions, devices, and making, viewing and comparing tensors.
ALLOWED_TORCH = {
    *("Tensor", "dtype", "bfloat16", "bool", "float32", "int8", "int32", "uint8", "nan"),
    *("float8_e4m3fn", "float8_e8m0fnu"),
    *("__file__", "__version__", "compiled_with_cxx11_abi"),
    *("arange", "empty", "equal", "from_file", "from_numpy", "full", "ones", "tensor", "zeros", "zeros_like"),
    *("device", "npu"),
    *("Generator", "randint", "randn"),  # operands to measure with
}
ARITHMETIC_METHODS = {
    *("abs", "add", "addmm", "bmm", "clamp", "cos", "cumsum", "div", "dot", "einsum", "exp", "exp2", "floor", "log"),
    *("log2", "matmul", "mean", "mm", "mul", "neg", "pow", "reciprocal", "round", "rsqrt", "sigmoid", "sin"),
    *("softmax", "sqrt", "square", "sub", "sum", "tanh", "where"),
}


def kernel_faults(source: str) -> list[str]:
    """What a kernel module does beyond imports, constants, stages and an entry."""
    faults = []
    for statement in ast.parse(source).body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            module = (statement.module or "") if isinstance(statement, ast.ImportFrom) else statement.names[0].name
            if module not in {"collections.abc", "typing", "pypto"} and not module.startswith(SHARED_PACKAGE):
                faults.append(f"imports {module}")
        elif isinstance(statement, ast.Assign):
            calls = [node for node in ast.walk(statement.value) if isinstance(node, (ast.Call, ast.Attribute))]
            if any(ast.unparse(node) != "float('-inf')" for node in calls):
                faults.append(f"line {statement.lineno}: computes at import")
        elif isinstance(statement, ast.Expr):
            if not isinstance(statement.value, ast.Constant):
                faults.append(f"line {statement.lineno}: runs something at import")
        elif not isinstance(statement, ast.FunctionDef):
            faults.append(f"line {statement.lineno}: {type(statement).__name__}")
    return faults


def host_faults(source: str) -> list[str]:
    """Torch arithmetic in a module that is no kernel."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            faults += [f"imports torch's {alias.name}" for alias in node.names if alias.name != "Tensor"]
        elif isinstance(node, ast.Import):
            faults += [f"imports {alias.name}" for alias in node.names if alias.name.startswith("torch.")]
        elif isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr not in ALLOWED_TORCH:
                faults.append(f"line {node.lineno}: torch.{node.attr}")
            elif node.attr.rstrip("_") in ARITHMETIC_METHODS and not isinstance(node.value, ast.Name):
                faults.append(f"line {node.lineno}: .{node.attr}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr.rstrip("_") in ARITHMETIC_METHODS:
                faults.append(f"line {node.lineno}: .{node.func.attr}()")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            faults.append(f"line {node.lineno}: @")
    return faults


def stages_without_entry(source: str, entries: tuple[str, ...] = ("make_entry",)) -> set[str]:
    """Functions at module level that no entry reaches."""
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    reached: set[str] = set()
    waiting = list(entries)
    while waiting:
        name = waiting.pop()
        if name in functions and name not in reached:
            reached.add(name)
            waiting += [node.id for node in ast.walk(functions[name]) if isinstance(node, ast.Name)]
    return set(functions) - reached


def names_in_other_kernels(path: Path) -> tuple[str, ...]:
    """What the other kernel modules mention: the entries of a module of shared stages."""
    trees = [ast.parse(other.read_text()) for other in KERNELS if other != path]
    return tuple(node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name))


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_a_kernel_module_is_nothing_but_kernel(path: Path) -> None:
    if path.stem == "tile_shapes":
        assert "pypto" not in path.read_text().split('"""', 2)[2]
        return
    assert kernel_faults(path.read_text()) == []
    entries = names_in_other_kernels(path) if path.parent.name == "stages" else ("make_entry",)
    assert stages_without_entry(path.read_text(), entries) == set()


@pytest.mark.parametrize("path", HOST_MODULES, ids=lambda path: path.stem)
def test_code_around_the_kernels_does_no_tensor_arithmetic(path: Path) -> None:
    assert host_faults(path.read_text()) == []


@pytest.mark.parametrize(
    "path", [path for path in KERNELS if path.parent.name == "kernels"], ids=lambda path: path.stem
)
def test_a_kernel_declares_its_tiles_and_why(path: Path) -> None:
    source = path.read_text()
    if path.stem == "canary" or "as make_" in source:  # an entry that another module makes has that module's tiles
        return
    assert "ROW_TILE = " in source
    assert "COLUMN_TILE = " in source
    assert "# Why: " in source


@pytest.mark.parametrize(
    "wrong",
    [
        "import torch\n",
        "from __future__ import annotations\n",
        "import pypto\nTABLE = pypto.full([8, 8], 1.0)\n",
        "import pypto\npypto.set_vec_tile_shapes(8, 8)\n",
        "for _ in range(2):\n    pass\n",
    ],
)
def test_a_kernel_module_with_something_else_is_found(wrong: str) -> None:
    assert kernel_faults(wrong) != []


def test_a_stage_outside_the_entry_is_found() -> None:
    assert stages_without_entry("def stage(x):\n    return x\ndef make_entry():\n    pass\n") == {"stage"}


@pytest.mark.parametrize(
    "wrong",
    [
        "import torch\ndef f(x):\n    return torch.rsqrt(x)\n",
        "def f(x):\n    return x.mean(-1)\n",
        "def f(x):\n    return x.float().mul_(2)\n",
        "def f(x, y):\n    return x @ y\n",
        "import torch.nn.functional as F\n",
        "from torch.nn import functional\n",
    ],
)
def test_torch_arithmetic_is_found(wrong: str) -> None:
    assert host_faults(wrong) != []
