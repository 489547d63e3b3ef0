"""What can go wrong while shards are written: each is one typed error, and nothing that looks finished stays."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from v41_config import ParallelLayout
from v41_loader import Inventory, read_inventory, shard_checkpoint
from v41_loader.errors import DiskFullError, FileReadError, OutputWriteError, SourceChangedError
from v41_loader.sharding.output_directory import PARTIAL_DIRECTORY

LAYOUT = ParallelLayout(2, 1)


@pytest.fixture(scope="module")
def reference(small_source: Inventory, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an undisturbed run writes."""
    out = tmp_path_factory.mktemp("reference") / "out"
    shard_checkpoint(small_source, out, LAYOUT)
    return contents(out)


@pytest.fixture
def copied(small_source: Inventory, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may change."""
    return Path(shutil.copytree(small_source.directory, tmp_path / "copied"))


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def failing(call: Callable[..., int | None], at: int, code: int) -> Callable[..., int | None]:
    """The at-th call fails and does nothing; so do all after it."""
    made = 0

    def wrapper(*arguments: object) -> int | None:
        nonlocal made
        made += 1
        if made >= at:
            raise OSError(code, os.strerror(code))
        return call(*arguments)

    return wrapper


@pytest.mark.parametrize(("name", "at", "code", "error"), [
    ("pwrite", 1, errno.ENOSPC, DiskFullError),
    ("pwrite", 400, errno.ENOSPC, DiskFullError),
    ("pwrite", 400, errno.EDQUOT, DiskFullError),
    ("pwrite", 400, errno.EIO, OutputWriteError),
    ("write", 1, errno.ENOSPC, DiskFullError),
    ("write", 10, errno.ENOSPC, DiskFullError),
    ("fsync", 1, errno.ENOSPC, DiskFullError),
    ("fsync", 3, errno.EIO, OutputWriteError),
    ("ftruncate", 2, errno.ENOSPC, DiskFullError),
    ("posix_fallocate", 2, errno.ENOSPC, DiskFullError),
    ("replace", 2, errno.EIO, OutputWriteError),
    ("replace", 4, errno.ENOSPC, DiskFullError),
])  # fmt: skip
def test_bytes_that_the_disk_does_not_take(
    small_source: Inventory, tmp_path: Path, reference: dict[str, bytes], name: str, at: int, code: int,
    error: type[OutputWriteError],
) -> None:  # fmt: skip
    """Wherever it happens: no manifest, so nothing that another command takes for shards; and the next run goes on."""
    inventory, out = small_source, tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, failing(getattr(os, name), at, code))
        with pytest.raises(error, match=os.strerror(code)) as caught:
            shard_checkpoint(inventory, out, LAYOUT)
    assert type(caught.value) is error
    assert "manifest.json" not in names(out)
    shard_checkpoint(inventory, out, LAYOUT)
    assert contents(out) == reference


def test_a_file_system_that_cannot_reserve_blocks(
    small_source: Inventory, tmp_path: Path, reference: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(os.posix_fallocate, 1, errno.EOPNOTSUPP))
    shard_checkpoint(small_source, tmp_path / "out", LAYOUT)
    assert contents(tmp_path / "out") == reference


def test_a_disk_without_room_is_known_before_anything_is_read(
    small_source: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inventory = small_source
    status = os.statvfs(tmp_path)
    full = os.statvfs_result((*status[:4], 2_000_000 // status.f_frsize, *status[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    monkeypatch.setattr(os, "preadv", failing(os.preadv, 2, errno.EIO))  # the first is of config.json
    with pytest.raises(DiskFullError, match="bytes free") as caught:
        shard_checkpoint(inventory, tmp_path / "out", LAYOUT)
    assert caught.value.where == str(tmp_path / "out")
    assert not list((tmp_path / "out").glob("**/rank-*"))


def test_a_limit_that_the_kernel_enforces(small_source: Inventory, tmp_path: Path) -> None:
    """A file size limit makes real writes fail, in threads and all; the command says so in one line."""
    code = "import sys; from v41_loader.cli import main; sys.exit(main())"
    options = ["--checkpoint", str(small_source.directory), "--tp", "2", "--dp", "1", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-c", code, "shard", *options]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    found = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, preexec_fn=limit)
    assert found.returncode == 2
    assert found.stderr.startswith("v41-loader: ")
    assert "File too large" in found.stderr
    assert found.stderr.count("\n") == 1
    assert names(tmp_path / "out") == [PARTIAL_DIRECTORY]


def test_bytes_that_the_source_does_not_give(
    small_source: Inventory, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    """A read error half-way names file and offset; what was read before is kept for the next run."""
    inventory, out = small_source, tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", failing(os.preadv, 200, errno.EIO))
        with pytest.raises(FileReadError, match=r"model-0000\d-of-00003\.safetensors at byte \d+"):
            shard_checkpoint(inventory, out, LAYOUT)
    assert names(out) == [PARTIAL_DIRECTORY]
    shard_checkpoint(inventory, out, LAYOUT)
    assert contents(out) == reference


def write_into(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\0")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))  # a clock may tick slower than this test


def append_to(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace(path: Path) -> None:
    twin = path.with_name("twin")
    twin.write_bytes(path.read_bytes())
    twin.rename(path)


@pytest.mark.parametrize("change", [write_into, append_to, cut_short, replace])
@pytest.mark.parametrize("file", ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"])
def test_a_source_that_changes_under_the_run(
    copied: Path, tmp_path: Path, change: Callable[[Path], None], file: str
) -> None:
    """The first file while or after it is read, the last before: an error, and what was made of it is removed.

    A file that is replaced stays readable as it was for whoever has it open: that is no change to the bytes.
    """
    inventory, out = read_inventory(copied), tmp_path / "out"
    changed = False

    def progress(*_: int) -> None:
        nonlocal changed
        if not changed:
            change(copied / file)
        changed = True

    if change is replace and file.startswith("model-00001"):
        shard_checkpoint(inventory, out, LAYOUT, progress=progress, threads=1)
        assert "manifest.json" in names(out)
        return
    with pytest.raises(SourceChangedError, match=file):
        shard_checkpoint(inventory, out, LAYOUT, progress=progress, threads=1)
    assert changed
    assert names(out) == []


@pytest.mark.parametrize("at", [2, 40, 150])
def test_a_source_that_changes_between_two_tensors_of_one_run(copied: Path, tmp_path: Path, at: int) -> None:
    """A thread reads up to 32 tensors on its own: it notices at the first one, not when it is through."""
    inventory, out = read_inventory(copied), tmp_path / "out"
    read, calls, changed, read_since = os.preadv, 0, -1, 0

    def changing(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal calls, changed, read_since
        calls += 1
        if calls == at:
            changed = fd
            write_into(Path(os.readlink(f"/proc/self/fd/{fd}")))
        read_since += fd == changed
        return read(fd, buffers, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", changing)
        with pytest.raises(SourceChangedError, match=r"model-0000\d-of-00003\.safetensors"):
            shard_checkpoint(inventory, out, LAYOUT, threads=1)
    assert 1 <= read_since < 16
    assert names(out) == []


def test_a_source_that_changed_since_it_was_checked(copied: Path, tmp_path: Path) -> None:
    inventory = read_inventory(copied)
    for file in ("model-00002-of-00003.safetensors", "config.json"):
        status = (copied / file).stat()
        os.utime(copied / file, ns=(0, status.st_mtime_ns + 1))
        with pytest.raises(SourceChangedError, match=file):
            shard_checkpoint(inventory, tmp_path / "out", LAYOUT)
        os.utime(copied / file, ns=(0, status.st_mtime_ns))
    assert not list(tmp_path.glob("out/**/*"))


def test_the_caller_stops_the_run(small_source: Inventory, tmp_path: Path, reference: dict[str, bytes]) -> None:
    """Ctrl-C while it runs: it ends soon, and the next one goes on."""
    inventory = small_source
    calls = 0

    def progress(*_: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shard_checkpoint(inventory, tmp_path / "out", LAYOUT, progress=progress)
    assert names(tmp_path / "out") == [PARTIAL_DIRECTORY]
    shard_checkpoint(inventory, tmp_path / "out", LAYOUT)
    assert contents(tmp_path / "out") == reference
