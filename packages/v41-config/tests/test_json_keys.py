"""Untrusted JSON: one typed error for what is not JSON in UTF-8 with each key once."""

from __future__ import annotations

from pathlib import Path

import pytest

from v41_config import ConfigError
from v41_config.json_keys import read_json

TEXT = '{"a": [1, {"b": null}]}'


def test_the_value_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(TEXT)
    assert read_json(tmp_path / "file.json", len(TEXT), "file", ConfigError) == {"a": [1, {"b": None}]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "file.json: expected JSON in UTF-8, found Expecting"),
        (b"\xff", "file.json: expected JSON in UTF-8, found 'utf-8' codec"),
        (TEXT.encode("utf-8-sig"), "file.json: expected JSON in UTF-8, found Unexpected UTF-8 BOM"),
        *((TEXT.encode(encoding), "expected JSON in UTF-8") for encoding in ("utf-16", "utf-16-le", "utf-32")),
        (b"[" * 100_000, "expected JSON in UTF-8"),
        (b"1" * 5000, "expected JSON in UTF-8"),
        (b'[{"a": {"b": 1, "b": 1}}]', "file.json: b: expected it once, found the key twice"),
        (b" " * 200_001, "file.json: expected a file of at most 200000 bytes"),
    ],
    ids=lambda value: repr(value[:8]),
)
def test_anything_else_is_one_error(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "file.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_json(tmp_path / "file.json", 200_000, "file", ConfigError)


def test_callers_choose_their_words(tmp_path: Path) -> None:
    def repeated(key: str) -> ConfigError:
        return ConfigError(key, "two values", "one")

    (tmp_path / "file.json").write_text('{"a": 1, "a": 2}')
    with pytest.raises(ConfigError, match=r"^a: expected one, found two values"):
        read_json(tmp_path / "file.json", 100, "file", ConfigError, repeated=repeated)
    (tmp_path / "file.json").write_text("{")
    with pytest.raises(ConfigError, match="expected a list, found Expecting"):
        read_json(tmp_path / "file.json", 100, "file", ConfigError, "a list")
