"""The private copy of pypto: what differs in it, who makes it, and that the installed package is only read."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from v41_kernels import PyptoInstall, PyptoInstallError
from v41_kernels.pypto_for_a5 import package_digest, pypto_for_a5

DESCRIPTION = "[version]\nSoC_version=Ascend910B1\nNpuArch=2201\n\n[SoCInfo]\nai_core_cnt=24\n"


@pytest.fixture
def pypto(tmp_path: Path) -> PyptoInstall:
    """A package with a description of its platform, read-only as a distribution's may be, and compiled Python."""
    package = tmp_path / "installed" / "pypto"
    for directory in ("lib/configs", "frontend/__pycache__"):
        (package / directory).mkdir(parents=True)
    (package / "lib" / "configs" / "A2A3.ini").write_text(DESCRIPTION)
    (package / "lib" / "configs" / "A2A3.ini").chmod(0o444)
    (package / "lib" / "core.so").write_bytes(b"\x7fELF")
    (package / "frontend" / "__init__.py").write_text("")
    (package / "frontend" / "__pycache__" / "__init__.cpython-311.pyc").write_bytes(b"compiled")
    return PyptoInstall(package, "0.2.0")


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_one_line_of_the_copy_differs(tmp_path: Path, pypto: PyptoInstall) -> None:
    before = contents(pypto.package)
    site = pypto_for_a5(pypto, tmp_path / "cache")
    copied = contents(site / "pypto")
    expected = {name: content for name, content in before.items() if "__pycache__" not in name}
    expected["lib/configs/A2A3.ini"] = DESCRIPTION.replace("NpuArch=2201", "NpuArch=3510").encode()
    assert copied == expected
    assert contents(pypto.package) == before
    assert "Version: 0.2.0\n" in (site / "pypto-0.2.0.dist-info" / "METADATA").read_text()


def test_the_key_follows_every_file_and_the_version(tmp_path: Path, pypto: PyptoInstall) -> None:
    cache = tmp_path / "cache"
    first = pypto_for_a5(pypto, cache)
    (pypto.package / "frontend" / "__pycache__" / "other.pyc").write_bytes(b"compiled again")
    assert pypto_for_a5(pypto, cache) == first
    (pypto.package / "lib" / "core.so").write_bytes(b"\x7fELF, another one")
    second = pypto_for_a5(pypto, cache)
    third = pypto_for_a5(PyptoInstall(pypto.package, "0.2.1"), cache)
    assert len({first, second, third}) == 3
    assert (second / "pypto" / "lib" / "core.so").read_bytes() == b"\x7fELF, another one"


def test_another_file_with_the_same_bytes_is_another_package(pypto: PyptoInstall) -> None:
    before = package_digest(pypto)
    (pypto.package / "lib" / "core.so").rename(pypto.package / "lib" / "other.so")
    assert package_digest(pypto) != before


def test_many_processes_share_one_copy(tmp_path: Path, pypto: PyptoInstall) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(pypto_for_a5(pypto, tmp_path / "cache"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert list((tmp_path / "cache" / "pypto-a5").iterdir()) == [found[0]]  # and nothing half-made


@pytest.mark.parametrize("description", ["[version]\n", DESCRIPTION + "NpuArch=2201\n", "NpuArch=22011\n", None])
def test_a_description_that_cannot_be_changed(tmp_path: Path, pypto: PyptoInstall, description: str | None) -> None:
    file = pypto.package / "lib" / "configs" / "A2A3.ini"
    file.unlink()
    if description is not None:
        file.write_text(description)
    with pytest.raises(PyptoInstallError, match="NpuArch=2201"):
        pypto_for_a5(pypto, tmp_path / "cache")
    assert list((tmp_path / "cache" / "pypto-a5").iterdir()) == []


def to_a_file(site: Path) -> None:
    shutil.rmtree(site)
    site.write_text("")


def to_a_link_that_leads_nowhere(site: Path) -> None:
    shutil.rmtree(site)
    site.symlink_to(site.parent / "nowhere")


def to_another_directory(site: Path) -> None:
    shutil.rmtree(site)
    (site.parent.parent / "other").mkdir()
    site.symlink_to(site.parent.parent / "other")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda site: shutil.rmtree(site / "pypto"),
        lambda site: (site / "pypto" / "lib" / "core.so").unlink(),
        lambda site: (site / "pypto" / "lib" / "core.so").write_bytes(b"\x7fELF, another one"),
        lambda site: (site / "pypto" / "lib" / "configs" / "A2A3.ini").write_text(DESCRIPTION),
        lambda site: (site / "pypto" / "more.py").write_text(""),
        to_a_file,
        to_a_link_that_leads_nowhere,
        to_another_directory,
    ],
)
def test_a_copy_that_is_no_longer_what_was_made_is_refused(
    tmp_path: Path, pypto: PyptoInstall, spoil: Callable[[Path], object]
) -> None:
    site = pypto_for_a5(pypto, tmp_path / "cache")
    (site / "pypto" / "frontend" / "__pycache__").mkdir()
    (site / "pypto" / "frontend" / "__pycache__" / "__init__.cpython-311.pyc").write_bytes(b"compiled in use")
    assert pypto_for_a5(pypto, tmp_path / "cache") == site
    spoil(site)
    with pytest.raises(PyptoInstallError, match=site.name):
        pypto_for_a5(pypto, tmp_path / "cache")
    assert [path.name for path in site.parent.iterdir()] == [site.name]


def test_a_cache_that_is_no_directory_is_refused(tmp_path: Path, pypto: PyptoInstall) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(PyptoInstallError, match="XDG_CACHE_HOME names another"):
        pypto_for_a5(pypto, tmp_path / "cache")
