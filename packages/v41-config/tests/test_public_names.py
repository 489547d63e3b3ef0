"""Every public name is documented: in docs/names.md, and by a docstring where Python keeps one."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import v41_config

NAMES = Path(__file__).parents[1] / "docs" / "names.md"


def test_every_name_and_no_other_is_listed() -> None:
    listed = [
        name
        for line in NAMES.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    ]
    assert sorted(listed) == sorted(v41_config.__all__)


@pytest.mark.parametrize("name", v41_config.__all__)
def test_a_class_or_function_says_what_it_is(name: str) -> None:
    thing = getattr(v41_config, name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        assert thing.__module__.startswith("v41_config.")
        # a dataclass without a docstring gets its signature for one
        assert thing.__doc__
        assert not thing.__doc__.startswith(f"{name}(")
