"""Building the interpreter: what can be missing, what can fail, and who builds."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from v41_kernels import CalculatorBuildError, PyptoInstall, calculator
from v41_kernels.calculator import calculator_library, cxx_standard, default_cache_directory, find_cmake


@pytest.fixture
def pypto(tmp_path: Path) -> PyptoInstall:
    """An install with one source file."""
    source = tmp_path / "pypto" / "lib" / "calculator" / "src"
    source.mkdir(parents=True)
    (source / "calc.cpp").write_text("int one() { return 1; }\n")
    return PyptoInstall(tmp_path / "pypto", "0.2.0")


def put_executable(directory: Path, name: str, content: bytes) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_bytes(content)
    path.chmod(0o755)
    return path


def test_no_cmake(tmp_path: Path, pypto: PyptoInstall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CalculatorBuildError, match="apt-get install cmake") as caught:
        calculator_library(pypto, tmp_path / "cache")
    assert caught.value.found == "none"


def test_a_cmake_script_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = put_executable(tmp_path / "first", "cmake", b"#!/usr/bin/env python3\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'first'}::{tmp_path / 'second'}")
    with pytest.raises(CalculatorBuildError) as caught:
        find_cmake()
    assert caught.value.found == f"only scripts: {script}"
    binary = put_executable(tmp_path / "second", "cmake", b"\x7fELF and the rest")
    assert find_cmake() == binary


@pytest.mark.parametrize(("variable", "language"), [("CC", "C"), ("CXX", "C++")])
def test_no_compiler(
    variable: str, language: str, tmp_path: Path, pypto: PyptoInstall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "no-such-compiler")
    with pytest.raises(CalculatorBuildError) as caught:
        calculator_library(pypto, tmp_path / "cache")
    assert caught.value.found == "none of no-such-compiler"
    assert f"a {language} compiler" in caught.value.expected


def test_a_build_that_fails_leaves_no_library(
    tmp_path: Path, pypto: PyptoInstall, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pypto.calculator_source / "CMakeLists.txt").write_text('message(FATAL_ERROR "the reason")\n')
    with pytest.raises(CalculatorBuildError, match="the reason") as caught:
        calculator_library(pypto, tmp_path / "cache")
    assert str(caught.value.found).startswith("exit status 1: CMake Error")
    left = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert [path.name for path in left] == ["build.log"]
    assert f"(output in {left[0]})" in caught.value.where
    assert "the reason" in left[0].read_text()


def test_one_of_many_builds(tmp_path: Path, pypto: PyptoInstall, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = []

    def slow_build(source: Path, library: Path, standard: int) -> None:
        builds.append(source)
        time.sleep(0.2)
        library.write_bytes(b"library")

    monkeypatch.setattr(calculator, "_build", slow_build)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(calculator_library(pypto, tmp_path / "cache"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert len(found) == 4
    assert len(set(found)) == 1


def test_a_lock_that_is_never_released(tmp_path: Path, pypto: PyptoInstall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calculator, "BUILD_SECONDS", 0.05)

    def build_within_a_build(source: Path, library: Path, standard: int) -> None:
        calculator_library(pypto, tmp_path / "cache")

    monkeypatch.setattr(calculator, "_build", build_within_a_build)
    with pytest.raises(CalculatorBuildError, match="lock that is still held"):
        calculator_library(pypto, tmp_path / "cache")


def test_a_cache_that_is_no_directory_is_refused(tmp_path: Path, pypto: PyptoInstall) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(CalculatorBuildError, match="XDG_CACHE_HOME names another"):
        calculator_library(pypto, tmp_path / "cache")


def test_the_key_follows_source_and_torch(tmp_path: Path, pypto: PyptoInstall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calculator, "_build", lambda source, library, standard: library.write_bytes(b""))
    cache = tmp_path / "cache"
    first = calculator_library(pypto, cache)
    assert calculator_library(pypto, cache) == first
    (pypto.calculator_source / "src" / "calc.cpp").write_text("int one() { return 2; }\n")
    second = calculator_library(pypto, cache)
    monkeypatch.setattr("torch.__version__", "2.99.0")
    third = calculator_library(pypto, cache)
    assert len({first, second, third}) == 3


def test_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_directory() == tmp_path / "v41-kernels"
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert default_cache_directory() == Path.home() / ".cache" / "v41-kernels"


@pytest.mark.parametrize(("version", "standard"), [("2.7.0", 17), ("2.13.0+cpu", 17), ("2.14.0", 20), ("3.0.0a1", 20)])
def test_cxx_standard(version: str, standard: int) -> None:
    assert cxx_standard(version) == standard


def test_the_standard_is_raised_although_the_source_demands_another(tmp_path: Path) -> None:
    """What the source's own build file says, and what the compiler is told in the end."""
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\nproject(P LANGUAGES C CXX)\n"
        "set(CMAKE_CXX_STANDARD 17)\nset(CMAKE_CXX_STANDARD_REQUIRED ON)\nset(CMAKE_CXX_EXTENSIONS OFF)\n"
        "add_library(one SHARED one.cpp)\n"
    )
    (tmp_path / "one.cpp").write_text("int one() { return 1; }\n")
    include = calculator._raise_standard(tmp_path, 20)
    build = tmp_path / "build"
    settings = ["-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", f"-DCMAKE_PROJECT_INCLUDE={include}"]
    subprocess.run([find_cmake(), "-S", tmp_path, "-B", build, *settings], check=True, capture_output=True)
    command = json.loads((build / "compile_commands.json").read_text())[0]["command"]
    assert "-std=c++20" in command
    assert "-std=c++17" not in command


def test_a_real_build_of_the_smallest_source(tmp_path: Path, pypto: PyptoInstall) -> None:
    """The whole way with the real tools, on a source that compiles in a second."""
    (pypto.calculator_source / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\nproject(P LANGUAGES C CXX)\n"
        "if(NOT DEFINED PY3_MOD_TORCH_VERSION OR NOT EXISTS ${PY3_MOD_TORCH_ROOT_PATH}/include)\n"
        '  message(FATAL_ERROR "torch is not described")\nendif()\n'
        "add_library(tile_fwk_calculator SHARED src/calc.cpp)\n"
        'install(TARGETS tile_fwk_calculator LIBRARY DESTINATION "lib")\n'
    )
    library = calculator_library(pypto, tmp_path / "cache")
    assert library.read_bytes()[:4] == b"\x7fELF"
    assert {path.name for path in library.parent.iterdir()} <= {library.name, library.with_suffix(".lock").name}
    shutil.rmtree(pypto.calculator_source / "src")
    with pytest.raises(CalculatorBuildError):  # another source, another build
        calculator_library(pypto, tmp_path / "cache")
