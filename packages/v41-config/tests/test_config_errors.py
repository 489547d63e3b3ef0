"""The one family of errors: message, attributes, pickling, and messages that stay short whatever was found."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from v41_config import ConfigError, LayoutError, MetadataError, V41Error
from v41_config.errors import SlabError


@pytest.mark.parametrize("kind", [V41Error, ConfigError, LayoutError, MetadataError, SlabError])
def test_where_found_and_expected(kind: type[V41Error]) -> None:
    error = kind("rank", 9, "0 <= rank < 8")
    assert str(error) == "rank: expected 0 <= rank < 8, found 9"
    assert (error.where, error.found, error.expected) == ("rank", 9, "0 <= rank < 8")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301 - what was just dumped
        assert type(other) is kind
        assert str(other) == str(error)
        assert (other.where, other.found, other.expected) == ("rank", 9, "0 <= rank < 8")


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        (None, "None"),
        (-1.5, "-1.5"),
        (2**63, "9223372036854775808"),
        ("tp=3", "'tp=3'"),
        ([0, 1, [2, (3,)]], "[0, 1, [2, (3,)]]"),
        ({2: "a", 1: b"b"}, "{1: b'b', 2: 'a'}"),
        (range(4), "range(0, 4)"),
        ("no such file", "no such file"),
        ("one: two 'three'", "one: two 'three'"),
        ("", "''"),
        ("word", "'word'"),
        (" a b", "' a b'"),
        ("a  b", "'a  b'"),
        ("a\nb c", "'a\\nb c'"),
        ("a \x1b[31mb", "'a \\x1b[31mb'"),
        (["a b"], "['a b']"),
    ],
)
def test_small_values_are_shown_whole_and_words_as_they_are(found: object, shown: str) -> None:
    assert str(V41Error("here", found, "else")) == f"here: expected else, found {shown}"


HUGE: list[tuple[Any, str]] = [
    ("x" * 10**6, "'xxx"),
    ("x " * 10**6 + "x", "x x x"),
    (b"x" * 10**6, "b'xxx"),
    (list(range(10**6)), "[0, 1, 2, "),
    ([["y" * 10**4] * 1000] * 1000, "[['yyy"),
    (dict.fromkeys(range(1000), "z" * 1000), "{0: 'zzz"),
    (np.arange(10**6), "array([ "),
    (10**100_000, "<an integer of 332193 bits>"),
    ([10**100_000], "[<an integer of 332193 bits>]"),
]


@pytest.mark.parametrize(("found", "start"), HUGE, ids=lambda value: type(value).__name__)
def test_messages_stay_short(found: object, start: str) -> None:
    error = V41Error("here", found, "something small")
    assert str(error).startswith(f"here: expected something small, found {start}")
    assert len(str(error)) < 700
    assert error.found is found


def test_a_value_that_cannot_be_shown_does_not_hide_the_error() -> None:
    class Hostile:
        def __repr__(self) -> str:
            raise RuntimeError

    assert "Hostile instance" in str(V41Error("here", Hostile(), "a number"))
