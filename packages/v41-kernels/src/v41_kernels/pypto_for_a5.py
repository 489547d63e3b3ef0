"""A private copy of pypto that compiles for the A5, in the user's cache directory.

The wheel compiles for the 910B because its platform description says so; the compiler itself knows both. The copy
differs from the installed package in that one line, and the installed package is only read. Whole files are copied
(25 MB): links would break with the environment that the copy was made from, while another one with the same files
uses the same copy.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from v41_kernels.errors import PyptoInstallError
from v41_kernels.pypto_install import PyptoInstall

ARCHITECTURE = "DAV_3510"
"""What pypto calls the A5's architecture, once it compiles for it."""

_DESCRIPTION = Path("lib", "configs", "A2A3.ini")
_INSTALLED_LINE = "NpuArch=2201\n"
_A5_LINE = "NpuArch=3510\n"
# The description's memory sizes stay those of the 910B, which has less of everything: tiles that fit there fit here.


def pypto_for_a5(pypto: PyptoInstall, cache: Path) -> Path:
    """The directory to put first on the import path; the copy is made if the cache has none of these files.

    It appears by one rename, so that another process sees all of it or nothing, and is compared with the installed
    package before each use. Errors: `PyptoInstallError` if the installed package's description does not have the line
    that is changed, if the cache cannot be written, or if the copy is no longer what was made.
    """
    site = cache / "pypto-a5" / package_digest(pypto)[:16]
    try:
        if not site.is_dir():
            _make(pypto, site)
        copied = package_digest(PyptoInstall(site / "pypto", pypto.version))
    except (OSError, shutil.Error) as error:
        expected = "a cache directory that can be read and written: XDG_CACHE_HOME names another"
        raise PyptoInstallError(str(site), str(error), expected) from error
    if copied != package_digest(pypto, for_a5=True):
        expected = "the installed package but for one line: remove this directory, and it is made again"
        raise PyptoInstallError(str(site), "a copy of pypto with missing or other files", expected)
    return site


def package_digest(pypto: PyptoInstall, *, for_a5: bool = False) -> str:
    """SHA-256 of the package's version and of the names and bytes of its files, compiled Python apart.

    With `for_a5` it is that of the copy, which has another line in its description.
    """
    digest = hashlib.sha256(pypto.version.encode() + b"\0")
    for path in sorted(pypto.package.rglob("*")):
        if path.is_file() and path.parent.name != "__pycache__":
            name, content = path.relative_to(pypto.package), path.read_bytes()
            if for_a5 and name == _DESCRIPTION:
                content = content.replace(_INSTALLED_LINE.encode(), _A5_LINE.encode())
            digest.update(str(name).encode() + b"\0")
            digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()


def _make(pypto: PyptoInstall, site: Path) -> None:
    site.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="copy-", dir=site.parent) as scratch:
        copy = Path(scratch) / "site"
        shutil.copytree(pypto.package, copy / "pypto", ignore=shutil.ignore_patterns("__pycache__"))
        _put_metadata(copy, pypto.version)
        _change_architecture(copy / "pypto" / _DESCRIPTION)
        try:
            os.rename(copy, site)
        except OSError:
            if not site.is_dir():  # otherwise another process has made the same copy in the meantime
                raise


def _put_metadata(site: Path, version: str) -> None:
    """What a package's version is read from."""
    directory = site / f"pypto-{version}.dist-info"
    directory.mkdir()
    (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: pypto\nVersion: {version}\n")


def _change_architecture(description: Path) -> None:
    found = description.read_text(encoding="utf-8") if description.is_file() else ""
    if found.count(_INSTALLED_LINE) != 1:
        where, times = f"pypto: {_DESCRIPTION}", found.count(_INSTALLED_LINE)
        raise PyptoInstallError(where, f"{times} lines {_INSTALLED_LINE.strip()}", "one, to compile for the A5 instead")
    description.unlink()  # it may be read-only
    description.write_text(found.replace(_INSTALLED_LINE, _A5_LINE), encoding="utf-8")
