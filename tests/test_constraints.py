"""constraints.txt pins everything that the five distributions and their tests draw in."""

from __future__ import annotations

from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

WORKSPACE = Path(__file__).parents[1]
ROOTS = [
    *(path.parent.name for path in WORKSPACE.glob("packages/*/pyproject.toml")),
    "pytest",
    "hypothesis",
    "ml-dtypes",
    "mypy",
    "tokenizers",
]


def pins() -> dict[str, Requirement]:
    """The lines of constraints.txt that apply to this Python."""
    lines = (WORKSPACE / "constraints.txt").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if not line.startswith("#")]
    return {
        canonicalize_name(requirement.name): requirement
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate()
    }


def drawn_in(roots: list[str]) -> set[str]:
    """Third-party distributions that `roots` require here, themselves or through others, without extras."""
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        for requirement in map(Requirement, requires(waiting.pop()) or []):
            name = canonicalize_name(requirement.name)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if applies and name not in found:
                found.add(name)
                waiting.append(name)
    return {name for name in found if not name.startswith("v41-")}


def test_everything_drawn_in_is_pinned_to_one_version() -> None:
    pinned = pins()
    needed = drawn_in(ROOTS)
    assert {"torch", "numpy", "pydantic-core", "iniconfig"} <= needed  # the walk goes through siblings and beyond
    assert sorted(needed - set(pinned)) == []
    assert [str(pin) for pin in pinned.values() if [item.operator for item in pin.specifier] != ["=="]] == []


def test_what_is_installed_is_what_is_pinned() -> None:
    pinned = pins()
    differing = {
        name: version(name)
        for name in drawn_in(ROOTS)
        if name in pinned and not pinned[name].specifier.contains(version(name), prereleases=True)
    }
    assert differing == {}
