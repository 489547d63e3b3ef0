"""Who may import whom: each distribution imports what it declares, and what it declares is what the design allows."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest

from import_rules import Declared, broken_rules

PACKAGES = Path(__file__).parents[1] / "packages"

# distribution: (siblings it requires, siblings an extra adds)
SIBLINGS = {
    "v41-config": (set(), set()),
    "v41-loader": ({"v41_config"}, set()),
    "v41-goldens": ({"v41_config"}, set()),
    "v41-kernels": ({"v41_config"}, set()),
    "v41-model": ({"v41_config", "v41_loader", "v41_goldens"}, {"v41_kernels"}),
}


@pytest.mark.parametrize("distribution", SIBLINGS)
def test_sources_import_only_what_is_declared(distribution: str) -> None:
    source = PACKAGES / distribution / "src" / distribution.replace("-", "_")
    assert broken_rules(source, Declared.by(requires(distribution) or [])) == []


@pytest.mark.parametrize("distribution", SIBLINGS)
def test_declared_siblings(distribution: str) -> None:
    declared = Declared.by(requires(distribution) or [])
    found = tuple(
        {name for name in names if name.startswith("v41_")} for names in (declared.required, declared.optional)
    )
    assert found == SIBLINGS[distribution]
    assert ("pypto" in declared.required | declared.optional) == (distribution == "v41-kernels")


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("import os\nimport yaml\n", "wrong/module.py:2: yaml is not a declared dependency"),
        ("def f():\n    from pypto.frontend import jit\n", "wrong/module.py:2: pypto is not a declared dependency"),
        (
            "import importlib\nimportlib.import_module('pypto')\n",
            "wrong/module.py:2: pypto is not a declared dependency",
        ),
        ("import torch.nn\n", "wrong/module.py:1: torch is optional and must be imported inside a function"),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import json\nelse:\n    import torch\n",
            "wrong/module.py:5: torch is optional and must be imported inside a function",
        ),
    ],
)
def test_a_wrong_import_is_found(source: str, complaint: str, tmp_path: Path) -> None:
    package = tmp_path / "wrong"
    package.mkdir()
    (package / "module.py").write_text(source)
    assert broken_rules(package, Declared(frozenset({"numpy"}), frozenset({"torch"}))) == [complaint]


def test_allowed_imports_pass(tmp_path: Path) -> None:
    package = tmp_path / "right"
    package.mkdir()
    (package / "module.py").write_text(
        "from __future__ import annotations\nimport json\nfrom typing import TYPE_CHECKING\nimport numpy as np\n"
        "from right import other\nfrom . import other\nif TYPE_CHECKING:\n    import torch\n"
        "def f():\n    import torch\n"
    )
    assert broken_rules(package, Declared(frozenset({"numpy"}), frozenset({"torch"}))) == []


def test_config_leaves_torch_unimported() -> None:
    """In this environment torch is there to be imported; every module of v41_config does without it."""
    code = (
        "import importlib, pkgutil, sys, v41_config\n"
        "for module in pkgutil.walk_packages(v41_config.__path__, 'v41_config.'):\n"
        "    module.name.endswith('__main__') or importlib.import_module(module.name)\n"
        "print(sorted(name for name in ('torch', 'pypto') if name in sys.modules))"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout.strip() == "[]"
