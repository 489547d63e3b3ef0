"""PyPTO's interpreter, built once per user.

The wheel carries the interpreter ("calculator") as C++ source and would build it again in every process. Here it is
built once with cmake, and the library is kept in the user's cache directory under a key made of everything that goes
into it. Several processes may ask at the same time: one builds, the others wait, and the library appears by a rename.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from v41_config.user_cache import user_cache_directory
from v41_kernels.errors import CalculatorBuildError
from v41_kernels.pypto_install import PyptoInstall

LIBRARY = "libtile_fwk_calculator.so"
BUILD_SECONDS = 900.0
"""Longest time for a build, or for waiting for another process that builds; about 35 s on two idle cores."""

_CXX20_SINCE = (2, 14)  # the headers of later torch versions need C++20; the wheel's build asks for C++17


def default_cache_directory() -> Path:
    """Where the built interpreter is kept (see `user_cache_directory`)."""
    return user_cache_directory("v41-kernels")


def calculator_library(pypto: PyptoInstall, cache: Path) -> Path:
    """The built library, from the cache or built now.

    Errors: `CalculatorBuildError` if cmake or a C++ compiler is missing, if the build fails, or if the cache cannot be
    written.
    """
    standard = cxx_standard(torch.__version__)
    library = cache / "calculator" / _key(pypto, standard) / LIBRARY
    if library.is_file():
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(library.with_suffix(".lock"), timeout=BUILD_SECONDS):
            if not library.is_file():
                _build(pypto.calculator_source, library, standard)
    except Timeout:
        expected = f"the process that holds the lock to finish building within {BUILD_SECONDS:.0f} s"
        raise CalculatorBuildError(str(library.parent), "a lock that is still held", expected) from None
    except OSError as error:
        expected = "a cache directory that can be read and written: XDG_CACHE_HOME names another"
        raise CalculatorBuildError(str(library.parent), str(error), expected) from error
    return library


def cxx_standard(torch_version: str) -> int:
    """C++ standard that the headers of a torch version need: 17, or 20 for versions after 2.13."""
    major, minor = (int(part) for part in torch_version.split(".")[:2])
    return 20 if (major, minor) >= _CXX20_SINCE else 17


def find_cmake() -> Path:
    """The first cmake on the path that is a binary.

    The `cmake` that pip installs is a Python script: it works only in the environment it was made for, so it is
    skipped. Errors: `CalculatorBuildError`, with the scripts that were skipped.
    """
    scripts = []
    for directory in dict.fromkeys(os.environ.get("PATH", "").split(os.pathsep)):
        candidate = shutil.which("cmake", path=directory) if directory else None
        if candidate is None:
            continue
        with open(candidate, "rb") as file:
            if file.read(4) == b"\x7fELF":
                return Path(candidate)
        scripts.append(candidate)
    found = f"only scripts: {', '.join(scripts)}" if scripts else "none"
    raise CalculatorBuildError("PATH", found, "a cmake binary (on Debian: apt-get install cmake)")


def find_compilers() -> tuple[Path, Path]:
    """C and C++ compiler: `$CC` and `$CXX` if set, else the usual names. Errors: `CalculatorBuildError`."""
    return (
        _find_compiler("C", os.environ.get("CC"), ("cc", "gcc", "clang")),
        _find_compiler("C++", os.environ.get("CXX"), ("c++", "g++", "clang++")),
    )


def _find_compiler(language: str, configured: str | None, usual: Sequence[str]) -> Path:
    names = (configured,) if configured else usual
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    expected = f"a {language} compiler (on Debian: apt-get install g++)"
    raise CalculatorBuildError("PATH", f"none of {', '.join(names)}", expected)


def _key(pypto: PyptoInstall, standard: int) -> str:
    """Names the build by everything that goes into it: source, torch, ABI, C++ standard, machine."""
    digest = hashlib.sha256()
    ingredients = (pypto.version, torch.__version__, torch.compiled_with_cxx11_abi(), standard, platform.machine())
    digest.update(repr(ingredients).encode())
    for path in sorted(pypto.calculator_source.rglob("*")):
        if path.is_file():
            digest.update(str(path.relative_to(pypto.calculator_source)).encode() + b"\0")
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _build(source: Path, library: Path, standard: int) -> None:
    cmake = find_cmake()
    c_compiler, cxx_compiler = find_compilers()
    log = library.with_name("build.log")  # stays if the build fails
    log.unlink(missing_ok=True)
    # In the library's own directory, so that the rename at the end stays on one file system.
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as scratch:
        build = Path(scratch) / "build"
        settings = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_INSTALL_PREFIX": f"{scratch}/install",
            "CMAKE_C_COMPILER": str(c_compiler),
            "CMAKE_CXX_COMPILER": str(cxx_compiler),
            "PY3_MOD_TORCH_VERSION": torch.__version__,
            "PY3_MOD_TORCH_ROOT_PATH": str(Path(torch.__file__).parent),
            "PY3_MOD_TORCH_C_GLIBCXX_USE_CXX11_ABI": str(int(torch.compiled_with_cxx11_abi())),
        }
        if standard != 17:
            settings["CMAKE_PROJECT_INCLUDE"] = str(_raise_standard(Path(scratch), standard))
        _run([cmake, "-S", source, "-B", build, *(f"-D{name}={value}" for name, value in settings.items())], log)
        _run([cmake, "--build", build, "--parallel", "2"], log)
        _run([cmake, "--install", build], log)
        built = Path(scratch) / "install" / "lib" / LIBRARY
        if not built.is_file():
            raise CalculatorBuildError(f"cmake --install {build}", "no such file", f"{built.name} in its lib directory")
        os.replace(built, library)
    log.unlink()


def _raise_standard(scratch: Path, standard: int) -> Path:
    """A cmake file that makes "C++17", which the source's own build file demands, mean a later standard."""
    include = scratch / "raise_standard.cmake"
    include.write_text(f'set(CMAKE_CXX17_STANDARD_COMPILE_OPTION "-std=c++{standard}")\n')
    return include


def _run(command: Sequence[str | Path], log: Path) -> None:
    shown = " ".join(str(part) for part in command)
    with open(log, "ab") as output:
        try:
            completed = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, timeout=BUILD_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise CalculatorBuildError(shown, "still running", f"an end within {error.timeout:.0f} s") from None
    if completed.returncode != 0:
        found = f"exit status {completed.returncode}: {_first_error(log.read_text(errors='replace'))}"
        raise CalculatorBuildError(f"{shown} (output in {log})", found, "success")


def _first_error(output: str) -> str:
    """The first line that speaks of an error and what follows it, short enough for a message."""
    lines = output.splitlines()
    first = next((number for number, line in enumerate(lines) if "error" in line.lower()), -5)
    return " ".join(" ".join(lines[first:]).split())[:250]
