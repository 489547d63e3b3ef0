"""The documentation follows the code: contracts on its pages are generated, links lead somewhere, names exist."""

from __future__ import annotations

import functools
import re
from importlib import import_module
from pathlib import Path

import pytest

import v41_goldens
from v41_config import AttentionMode, OperatorSpec, TensorSpec, operators
from v41_goldens.compositions import COMPOSITIONS
from v41_goldens.operators import golden

PACKAGE = Path(__file__).parents[1]
DOCS = PACKAGE / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
SOURCES = "../../src/v41_goldens/"
MARKER = re.compile(r"^<!-- operators: (.*) -->$", re.MULTILINE)


def operand(tensor: TensorSpec) -> str:
    return f"`{tensor.name}` {tensor.dtype} `[{', '.join(map(str, tensor.dims))}]`"


def contract(spec: OperatorSpec, names: list[str]) -> str:
    """Operators that differ in name alone, their document, operands and function."""
    function = golden(spec.name).function
    module = function.__module__.removeprefix("v41_goldens.")
    link = f"[`{module}.{function.__qualname__}`](../../src/v41_goldens/{module.replace('.', '/')}.py)"
    lists = {
        word: ", ".join(operand(t) for t in spec.tensors if t.direction == direction)
        for word, direction in (("Reads", "in"), ("Updates", "inout"), ("Writes", "out"))
    }
    lines = [f"{word} {operands}." for word, operands in lists.items() if operands]
    return "\n\n".join(["### " + ", ".join(f"`{name}`" for name in names), f"{spec.doc} Golden: {link}.", *lines])


def generated(names: list[str]) -> str:
    groups: dict[object, list[str]] = {}
    for name in names:
        spec = operators()[name]
        groups.setdefault((spec.tensors, spec.scalars, spec.doc), []).append(name)
    return "\n\n".join(["## Operators", *(contract(operators()[group[0]], group) for group in groups.values())])


@pytest.mark.parametrize("page", sorted(DOCS.glob("parts/*.md")), ids=lambda page: page.stem)
def test_contracts_on_a_page_are_those_of_the_abi(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    marker = MARKER.search(text)
    if marker is None:
        assert "## Operators" not in text
        return
    expected = f"{text[: marker.end()]}\n\n{generated(marker[1].split())}\n"
    if text != expected:
        (tmp_path / page.name).write_text(expected)
        pytest.fail(f"{page.name} differs from the operators; as it should be: {tmp_path / page.name}")


def test_every_operator_is_on_one_page() -> None:
    named = [name for page in PAGES for match in MARKER.finditer(page.read_text()) for name in match[1].split()]
    assert sorted(named) == sorted(operators())


def test_the_index_names_every_operator_and_composition_beside_its_page() -> None:
    rows = re.findall(
        r"^\|[^|]*\| \[[^]]*\]\((parts/\w+\.md)\) \|([^|]*)\|$", (DOCS / "index.md").read_text(), re.MULTILINE
    )
    assert sorted(page for page, _ in rows) == sorted(str(page.relative_to(DOCS)) for page in DOCS.glob("parts/*.md"))
    listed = []
    for page, cell in rows:
        names = [
            name.replace("MODE", mode.value)
            for name in re.findall(r"`(\w+)`", cell)
            for mode in (AttentionMode if "MODE" in name else [AttentionMode.SWA])
        ]
        marker = MARKER.search((DOCS / page).read_text())
        assert sorted(names) == sorted(marker[1].split() if marker else names)
        listed += names
    assert sorted(listed) == sorted([*operators(), *COMPOSITIONS])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if target.startswith("../../v41-config"):
            continue  # another distribution, which stands beside this one in the repository alone
        file = page.parent / target
        if target.startswith(SOURCES):  # where the package is installed, which need not be beside the documents
            file = Path(v41_goldens.__file__).parent / target.removeprefix(SOURCES)
        assert file.is_file(), target


@pytest.mark.parametrize("page", sorted(DOCS.glob("parts/*.md")), ids=lambda page: page.stem)
def test_a_page_has_formula_rounding_code_and_tests(page: Path) -> None:
    """And the names it gives behind a module are defined there."""
    text = page.read_text()
    assert "**Rounding.**" in text
    assert "```" in text or "|---|" in text
    assert "Tests: [`test_" in text
    assert "**Shapes.**" in text or "<!-- operators:" in text
    code = text[text.index("**Code.**") : text.index("Tests: ")]
    parts = re.split(r"\[`([\w/]+)`\]\([^)]*\)", code)
    assert len(parts) > 1
    for module, names in zip(parts[1::2], parts[2::2], strict=True):
        found = import_module("v41_goldens." + module.replace("/", "."))
        for name in re.findall(r"`([A-Za-z_][\w.]*)`", names):
            functools.reduce(getattr, name.split("."), found) if not name.endswith("_") else None


def test_the_navigation_names_every_page() -> None:
    listed = re.findall(r": (\S+\.md)$", (PACKAGE / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in PAGES)
