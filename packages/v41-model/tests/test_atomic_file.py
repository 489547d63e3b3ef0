"""Output files: whole or absent, one typed error, and never in the place of something that is no file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from v41_model.atomic_file import atomic_file, require_writable
from v41_model.errors import OutputError


def test_a_fifo_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="a device, FIFO or socket"):
        require_writable(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("error", [OSError("disk full"), SafetensorError("disk full")])
def test_a_failed_write_leaves_nothing(tmp_path: Path, error: Exception) -> None:
    def write_half(partial: Path) -> None:
        partial.write_bytes(b"half")
        raise error

    with pytest.raises(OutputError, match="disk full"), atomic_file(tmp_path / "out") as partial:
        write_half(partial)
    assert list(tmp_path.iterdir()) == []


def test_permissions_follow_the_umask_whatever_the_writer_does(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    with atomic_file(tmp_path / "out") as partial:
        partial.write_bytes(b"whole")
        partial.chmod(0o600)
    assert (tmp_path / "out").read_bytes() == b"whole"
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_name_of_the_greatest_length(tmp_path: Path) -> None:
    with atomic_file(tmp_path / ("n" * 255)) as partial:
        partial.write_bytes(b"whole")
    assert (tmp_path / ("n" * 255)).read_bytes() == b"whole"
