"""Builds all distributions and checks that each one works alone.

For every distribution: the wheel is built from the sdist, looked into, and installed with nothing but its declared
dependencies (siblings from the wheels just built, other versions pinned by constraints.txt) into an empty environment.
There every module is imported, and the tests that the sdist carries are run against the installed wheel.

usage: check_wheels.py [DISTRIBUTION ...]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from packaging.metadata import parse_email

from import_rules import Declared

T = TypeVar("T")
WORKSPACE = Path(__file__).parents[1]
DISTRIBUTIONS = sorted(path.parent.name for path in WORKSPACE.glob("packages/*/pyproject.toml"))

# Imports every module of the package named by the first argument, but for `__main__`, and fails if one of the modules
# named by the others is loaded after that.
IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
name, *unwanted = sys.argv[1:]
package = importlib.import_module(name)
modules = [module.name for module in pkgutil.walk_packages(package.__path__, name + ".")]
for module in modules:
    if not module.endswith("__main__"):
        importlib.import_module(module)
loaded = [module for module in unwanted if module in sys.modules]
if loaded:
    sys.exit(f"importing {name} also imported {loaded}")
print(f"imported {len(modules) + 1} modules from {package.__path__[0]}")
"""


class WheelError(Exception):
    """A distribution is not what it should be."""


@dataclass(frozen=True)
class Built:
    distribution: str
    wheel: Path
    sdist: Path

    @property
    def import_name(self) -> str:
        return self.distribution.replace("-", "_")

    @property
    def unwanted_modules(self) -> list[str]:
        """Modules that must not be loaded when everything of this distribution has been imported."""
        return {"v41-config": ["torch", "pypto"], "v41-kernels": []}.get(self.distribution, ["pypto"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("distributions", nargs="*", metavar="DISTRIBUTION", default=DISTRIBUTIONS)
    wanted = parser.parse_args().distributions
    unknown = sorted(set(wanted) - set(DISTRIBUTIONS))
    if unknown:
        parser.error(f"expected some of {DISTRIBUTIONS}, found {unknown}")

    output = WORKSPACE / "dist"
    shutil.rmtree(output, ignore_errors=True)
    built = [build(distribution, output) for distribution in DISTRIBUTIONS]

    failures = 0
    for item in built:
        if item.distribution not in wanted:
            continue
        start = time.monotonic()
        say(f"{item.distribution}: checking {item.wheel.name}")
        try:
            check_contents(item)
            check_alone(item, built)
        except WheelError as error:
            failures += 1
            say(f"{item.distribution}: FAILED: {error}")
        else:
            say(f"{item.distribution}: ok in {time.monotonic() - start:.0f} s")
    say(f"{len(wanted) - failures} of {len(wanted)} distributions work alone")
    return 1 if failures else 0


def build(distribution: str, output: Path) -> Built:
    """sdist from the sources, wheel from the sdist, so that the sdist is known to be complete."""
    source = WORKSPACE / "packages" / distribution
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", output, source], quiet=True)
    stem = distribution.replace("-", "_")
    return Built(
        distribution,
        wheel=the_one(output.glob(f"{stem}-*.whl")),
        sdist=the_one(output.glob(f"{stem}-*.tar.gz")),
    )


def check_contents(item: Built) -> None:
    """The wheel is typed, licensed and holds the import package only; the sdist has the tests."""
    licence = (WORKSPACE / "LICENSE").read_bytes()
    with zipfile.ZipFile(item.wheel) as archive:
        wheel = archive.namelist()
        licences = [archive.read(name) for name in wheel if name.endswith(".dist-info/licenses/LICENSE")]
    if f"{item.import_name}/py.typed" not in wheel:
        raise WheelError(f"{item.wheel.name}: expected {item.import_name}/py.typed, found none")
    if licences != [licence]:
        raise WheelError(f"{item.wheel.name}: expected the text of ./LICENSE once, found {len(licences)} licences")
    strangers = sorted({name.split("/")[0] for name in wheel if ".dist-info/" not in name} - {item.import_name})
    if strangers:
        raise WheelError(f"{item.wheel.name}: expected only {item.import_name}/, found also {strangers}")
    with tarfile.open(item.sdist) as archive:
        sdist = archive.getnames()
    if not any("/tests/" in name and Path(name).name.startswith("test_") for name in sdist):
        raise WheelError(f"{item.sdist.name}: expected tests, found none")


def check_alone(item: Built, built: Sequence[Built]) -> None:
    """Install into an empty environment, import everything, run the sdist's tests."""
    with tempfile.TemporaryDirectory(prefix=f"{item.distribution}-") as name:
        directory = Path(name)
        venv.create(directory / "venv", symlinks=True)
        python = directory / "venv" / "bin" / "python"

        # As constraints, the sibling wheels are used where something declares them and are not installed otherwise.
        siblings = directory / "siblings.txt"
        siblings.write_text("".join(f"{other.distribution} @ {other.wheel.as_uri()}\n" for other in built))
        pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python, "-qq", "--disable-pip-version-check"]
        install: list[str | Path] = [
            *pip,
            "install",
            "--constraint",
            WORKSPACE / "constraints.txt",
            "--constraint",
            siblings,
        ]
        if needs_torch(item, built):
            run([WORKSPACE / "tools" / "install_torch.sh", python])
        run([*install, item.wheel])
        run([*pip, "check"])
        run([python, "-I", "-c", IMPORT_EVERYTHING, item.import_name, *item.unwanted_modules], cwd=directory)

        run([*install, "--group", f"{WORKSPACE / 'pyproject.toml'}:test"])
        tests = unpack(item.sdist, directory)
        shutil.rmtree(tests / "src")  # the installed wheel is what is tested
        settings: list[str | Path] = ["-c", WORKSPACE / "pyproject.toml", "--rootdir", tests, "-p", "no:cacheprovider"]
        # CI=true: hypothesis takes its profile without time limits, as in the workspace's own conftest.py.
        run(
            [python, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", *settings, tests / "tests"],
            cwd=tests,
            CI="true",
        )


def needs_torch(item: Built, built: Sequence[Built]) -> bool:
    """Whether the wheel requires torch, itself or through a sibling; the CPU build has to be there first then."""
    with zipfile.ZipFile(item.wheel) as archive:
        metadata = the_one(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        fields, _ = parse_email(archive.read(metadata))
    required = Declared.by(fields.get("requires_dist", [])).required
    return "torch" in required or any(needs_torch(other, built) for other in built if other.import_name in required)


def unpack(sdist: Path, directory: Path) -> Path:
    shutil.unpack_archive(sdist, directory)
    return directory / sdist.name.removesuffix(".tar.gz")


def the_one(items: Iterable[T]) -> T:
    (only,) = items
    return only


def run(command: Sequence[str | Path], *, cwd: Path | None = None, quiet: bool = False, **variables: str) -> None:
    """Run a command that must succeed; a quiet one shows what it printed only if it fails."""
    completed = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **variables},
        check=False,
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else None,
    )
    if completed.returncode != 0:
        sys.stdout.buffer.write(completed.stdout or b"")
        raise WheelError(f"{' '.join(str(part) for part in command[:4])} ... exited {completed.returncode}")


def say(text: str) -> None:
    print(f"== {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
