"""Files that are not what, or not where, they should be."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from v41_config import ParallelLayout
from v41_loader import open_checkpoint, plan_shards, read_inventory, shard_checkpoint
from v41_loader.errors import (
    AmbiguousCheckpointError,
    CheckpointNotFoundError,
    FileReadError,
    LinkEscapeError,
    NotARegularFileError,
    ShardNameError,
    SourceChangedError,
)
from v41_loader.index import INDEX_FILE

SHARD = "model-00003-of-00006.safetensors"


@pytest.fixture
def no_hang() -> Iterator[None]:
    """Turns an endless wait into a failure after 20 seconds."""

    def stop(*_: object) -> None:
        raise TimeoutError("the call hangs")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


def send_to(directory: Path, file: str) -> None:
    """Let the index name `file` instead of one shard."""
    index = json.loads((directory / INDEX_FILE).read_text())
    index["weight_map"] = {k: file if v == SHARD else v for k, v in index["weight_map"].items()}
    (directory / INDEX_FILE).write_text(json.dumps(index))


@pytest.mark.parametrize("name", [
    "../outside.safetensors", "/etc/passwd", "..", ".", "", "sub/model.safetensors", "./" + SHARD, "a\0b",
    "..\\outside.safetensors", "C:\\x",
])  # fmt: skip
def test_a_shard_name_with_a_path_in_it(damaged: Path, name: str) -> None:
    """The index names a file outside the directory, or plainly by a path; the file may even exist."""
    shutil.move(damaged / SHARD, damaged.parent / "outside.safetensors")
    send_to(damaged, name)
    with pytest.raises(ShardNameError) as caught:
        open_checkpoint(damaged)
    assert caught.value.found == name
    assert re.fullmatch(rf"{re.escape(INDEX_FILE)}: layers\.\d\..+", caught.value.where)


@pytest.mark.parametrize("file", [SHARD, INDEX_FILE, "config.json"])
@pytest.mark.parametrize("absolute", [True, False])
def test_a_link_that_leaves_the_directory(damaged: Path, tmp_path: Path, file: str, absolute: bool) -> None:
    """A file is a link to a file elsewhere that would otherwise be perfect."""
    shutil.move(damaged / file, tmp_path / "elsewhere")
    (damaged / file).symlink_to(tmp_path / "elsewhere" if absolute else "../elsewhere")
    with pytest.raises(LinkEscapeError, match="elsewhere"):
        open_checkpoint(damaged)
    (tmp_path / "root").mkdir()
    with pytest.raises(LinkEscapeError, match="elsewhere"):
        open_checkpoint(damaged, allowed_root=tmp_path / "root")


def test_a_directory_beside_with_the_same_prefix_is_outside(damaged: Path) -> None:
    """`/x/damaged-too` starts with `/x/damaged` but is not inside it."""
    twin = damaged.with_name(damaged.name + "-too")
    twin.mkdir()
    shutil.move(damaged / SHARD, twin / SHARD)
    (damaged / SHARD).symlink_to(twin / SHARD)
    with pytest.raises(LinkEscapeError, match=twin.name):
        open_checkpoint(damaged)


def test_a_link_inside_the_directory_is_fine(damaged: Path) -> None:
    """Renaming a shard and linking to it changes nothing."""
    (damaged / SHARD).rename(damaged / "kept")
    (damaged / SHARD).symlink_to("kept")
    assert open_checkpoint(damaged).tensor("norm.weight").shape == (256,)


@pytest.mark.parametrize("file", [SHARD, INDEX_FILE, "config.json"])
def test_a_link_to_itself(damaged: Path, file: str) -> None:
    """A loop of links must end in an error."""
    (damaged / file).unlink()
    (damaged / file).symlink_to(file)
    with pytest.raises(FileReadError, match=file):
        open_checkpoint(damaged)


@pytest.mark.usefixtures("no_hang")
@pytest.mark.parametrize("file", [SHARD, INDEX_FILE, "config.json"])
def test_a_fifo(damaged: Path, file: str) -> None:
    """Opening a FIFO for reading would wait for a writer forever."""
    (damaged / file).unlink()
    os.mkfifo(damaged / file)
    with pytest.raises(NotARegularFileError, match=file):
        open_checkpoint(damaged)


def test_a_socket(damaged: Path) -> None:
    """What cannot be opened at all, as a device without a driver cannot."""
    (damaged / SHARD).unlink()
    directory = os.getcwd()
    os.chdir(damaged)  # the path of a socket has room for a hundred bytes
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(SHARD)
            with pytest.raises(FileReadError, match=SHARD):
                open_checkpoint(damaged)
    finally:
        os.chdir(directory)


@pytest.mark.parametrize("file", [SHARD, INDEX_FILE, "config.json"])
def test_a_directory_in_place_of_a_file(damaged: Path, file: str) -> None:
    """A directory where a file should be."""
    (damaged / file).unlink()
    (damaged / file).mkdir()
    with pytest.raises(NotARegularFileError, match=file):
        open_checkpoint(damaged)


@pytest.mark.parametrize("file", [SHARD, INDEX_FILE, "config.json"])
def test_a_file_that_is_not_there(damaged: Path, file: str) -> None:
    """A download that was cut off between files."""
    (damaged / file).unlink()
    with pytest.raises(CheckpointNotFoundError, match=file):
        open_checkpoint(damaged)


def test_no_directory(tmp_path: Path) -> None:
    """A path that does not exist, or is a file."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(CheckpointNotFoundError, match=path.name):
            open_checkpoint(path)


def test_index_and_single_file_together(damaged: Path) -> None:
    """Two readers could take two different checkpoints from this directory."""
    shutil.copy(damaged / SHARD, damaged / "model.safetensors")
    with pytest.raises(AmbiguousCheckpointError):
        open_checkpoint(damaged)


def replaced(path: Path) -> None:
    shutil.copy(path, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 64)


def rewritten(path: Path) -> None:
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(len(data) - 1)
        file.write(bytes([data[-1] ^ 1]))
    os.utime(path, ns=(0, 0))


def removed(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("change", [replaced, truncated, rewritten])
@pytest.mark.parametrize("after_first_read", [False, True])
def test_a_shard_that_changes_after_the_check(
    damaged: Path, change: Callable[[Path], None], after_first_read: bool
) -> None:
    """Headers were checked, then the file is replaced, cut or written to: its bytes are no longer trusted."""
    checkpoint = open_checkpoint(damaged)
    shard = damaged / checkpoint.inventory.tensors["layers.2.attn_norm.weight"].file
    if after_first_read:
        checkpoint.tensor("layers.2.attn_norm.weight")
    change(shard)
    if change is replaced and after_first_read:  # the checked file is still open, and still the same
        assert checkpoint.tensor("layers.2.attn_norm.weight").shape == (256,)
    else:
        with pytest.raises(SourceChangedError, match=shard.name):
            checkpoint.tensor("layers.2.attn_norm.weight")


def test_a_shard_that_vanishes_after_the_check(damaged: Path) -> None:
    """The file is deleted between the check and the first read."""
    checkpoint = open_checkpoint(damaged)
    removed(damaged / SHARD)
    with pytest.raises(CheckpointNotFoundError, match=SHARD):
        checkpoint.read(checkpoint.names)


@pytest.mark.parametrize("change", [replaced, truncated, rewritten])
def test_a_shard_that_changes_between_plan_and_shard(
    damaged: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """A plan was made and agreed to; what is sharded must be what was planned, or nothing."""
    inventory, layout = read_inventory(damaged), ParallelLayout(2, 1)
    plan_shards(inventory, layout)
    change(damaged / SHARD)
    with pytest.raises(SourceChangedError, match=SHARD):
        shard_checkpoint(inventory, tmp_path / "out", layout)
    assert not list((tmp_path / "out").rglob("*.safetensors"))
