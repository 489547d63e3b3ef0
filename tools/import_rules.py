"""Which third-party and sibling modules a distribution's sources import, against what it declares as dependencies.

A required dependency may be imported anywhere; one that only an extra brings, only inside a function or under
`if TYPE_CHECKING`; everything else that is not the standard library, nowhere.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement


@dataclass(frozen=True)
class Import:
    """One import of a top-level module; `deferred` if importing the file does not carry it out."""

    module: str
    line: int
    deferred: bool


@dataclass(frozen=True)
class Declared:
    """Import names of a distribution's dependencies (import and distribution names agree but for the hyphen)."""

    required: frozenset[str]
    optional: frozenset[str]

    @classmethod
    def by(cls, requirements: Iterable[str]) -> Declared:
        """From the `Requires-Dist` lines of a distribution's metadata."""
        required: set[str] = set()
        optional: set[str] = set()
        for requirement in map(Requirement, requirements):
            only_an_extra = requirement.marker is not None and "extra" in str(requirement.marker)
            (optional if only_an_extra else required).add(requirement.name.replace("-", "_"))
        return cls(frozenset(required), frozenset(optional))


def imports_of(source: str) -> list[Import]:
    """All absolute imports in `source`, also `import_module("literal")` and `__import__("literal")`."""
    return list(_walk(ast.parse(source), deferred=False))


def broken_rules(source_directory: Path, declared: Declared) -> list[str]:
    """One line for each import under `source_directory` (an import package) that breaks the module's rules."""
    own_and_standard = {source_directory.name, "__future__", *sys.stdlib_module_names}
    broken = []
    for path in sorted(source_directory.rglob("*.py")):
        for found in imports_of(path.read_text()):
            if found.module in own_and_standard or found.module in declared.required:
                continue
            where = f"{path.relative_to(source_directory.parent)}:{found.line}"
            if found.module not in declared.optional:
                broken.append(f"{where}: {found.module} is not a declared dependency")
            elif not found.deferred:
                broken.append(f"{where}: {found.module} is optional and must be imported inside a function")
    return broken


def _walk(node: ast.AST, *, deferred: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(_top_level(alias.name), node.lineno, deferred)
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        yield Import(_top_level(node.module), node.lineno, deferred)
    elif isinstance(node, ast.Call) and _called_name(node.func) in {"import_module", "__import__"} and node.args:
        name = node.args[0]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield Import(_top_level(name.value), node.lineno, deferred)
    if isinstance(node, ast.If) and _called_name(node.test) == "TYPE_CHECKING":
        for statement in node.body:
            yield from _walk(statement, deferred=True)
        for statement in node.orelse:
            yield from _walk(statement, deferred=deferred)
        return
    inside = deferred or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, deferred=inside)


def _top_level(module: str) -> str:
    return module.partition(".")[0]


def _called_name(expression: ast.expr) -> str | None:
    if isinstance(expression, ast.Name):
        return expression.id
    return expression.attr if isinstance(expression, ast.Attribute) else None
