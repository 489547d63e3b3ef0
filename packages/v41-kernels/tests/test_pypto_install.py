"""Telling the CANN pypto from its namesake, from files alone."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest

from v41_kernels import Executor, PyptoInstallError, find_pypto
from v41_kernels.pypto_install import SUPPORTED_VERSION

FIX = f"pip install pypto=={SUPPORTED_VERSION}"


def put_package(site: Path, library: str, subpackage: str, version: str | None) -> None:
    """A directory that looks like an installed pypto. Importing it would raise."""
    package = site / "pypto"
    (package / subpackage).mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')\n")
    (package / library).write_bytes(b"")
    if version is not None:
        info = site / f"pypto-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: pypto\nVersion: {version}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory at the front of the import path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_the_right_one(site: Path) -> None:
    put_package(site, "pypto_impl.cpython-311-x86_64-linux-gnu.so", "frontend", SUPPORTED_VERSION)
    assert find_pypto().package == site / "pypto"
    assert find_pypto().version == SUPPORTED_VERSION


def test_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(PyptoInstallError, match=FIX) as caught:
        Executor()
    assert caught.value.found == "no package of that name"


def test_the_other_project(site: Path) -> None:
    # Under the supported version, because the version does not tell the two apart.
    put_package(site, "pypto_core.abi3.so", "language", SUPPORTED_VERSION)
    with pytest.raises(PyptoInstallError, match=FIX) as caught:
        find_pypto()
    assert caught.value.found == "the other project of that name"
    assert str(site) in caught.value.where


@pytest.mark.parametrize("version", ["0.2.1", "0.2.0.post1", "0.1.2", None])
def test_another_version(site: Path, version: str | None) -> None:
    put_package(site, "pypto_impl.so", "frontend", version)
    with pytest.raises(PyptoInstallError, match=FIX) as caught:
        find_pypto()
    assert str(caught.value.found).startswith("version ")


@pytest.mark.parametrize(("library", "subpackage"), [("pypto_impl.so", "language"), ("other.so", "frontend")])
def test_neither(site: Path, library: str, subpackage: str) -> None:
    put_package(site, library, subpackage, SUPPORTED_VERSION)
    with pytest.raises(PyptoInstallError, match="neither"):
        find_pypto()


def test_a_lone_module(site: Path) -> None:
    (site / "pypto.py").write_text("raise AssertionError('imported')\n")
    with pytest.raises(PyptoInstallError, match="neither"):
        find_pypto()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pypto has wheels for Linux only")
def test_the_installed_one_is_the_declared_one() -> None:
    assert find_pypto().version == SUPPORTED_VERSION
    declared = [requirement for requirement in requires("v41-kernels") or () if requirement.startswith("pypto")]
    assert len(declared) == 1
    assert declared[0].split(";")[0].strip() == f"pypto=={SUPPORTED_VERSION}"


def test_importing_the_package_changes_nothing(tmp_path: Path) -> None:
    """Neither pypto nor a log handler, a variable, a working directory or a file comes from the import."""
    code = (
        "import logging, os, sys\n"
        "before = (logging.root.level, list(logging.root.handlers), dict(os.environ), os.getcwd())\n"
        "import v41_kernels\n"
        "assert before == (logging.root.level, logging.root.handlers, dict(os.environ), os.getcwd())\n"
        "assert 'pypto' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []
