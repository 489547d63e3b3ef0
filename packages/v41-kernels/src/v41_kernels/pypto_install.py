"""Which `pypto` this interpreter would import, found without importing it.

Two unrelated projects use the import name. Ours is the distribution `pypto` (CANN): a C++ core `pypto_impl*.so` beside
a `frontend/` package. The other one has `pypto_core*.so` and `language/`. Their versions overlap, so files decide.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from v41_kernels.errors import PyptoInstallError

SUPPORTED_VERSION = "0.2.0"
"""The one version whose internals the CPU executor was written against and tested with."""

_EXPECTED = (
    f"the CANN distribution pypto {SUPPORTED_VERSION}: run `pip install pypto=={SUPPORTED_VERSION}` "
    "(wheels exist for Linux x86-64 and arm64, Python 3.10 to 3.12)"
)
_EXPECTED_INSTEAD = f"{_EXPECTED}, after `pip uninstall pypto` or in another environment"


@dataclass(frozen=True)
class PyptoInstall:
    """Where the package lies, and its exact version."""

    package: Path
    version: str

    @property
    def calculator_source(self) -> Path:
        """Source of the torch-based interpreter that the wheel carries."""
        return self.package / "lib" / "calculator"

    @property
    def device_runtime(self) -> Path:
        """The library that launches kernels on an NPU; it needs CANN."""
        return self.package / "lib" / "libtile_fwk_runtime.so"


def find_pypto() -> PyptoInstall:
    """The CANN pypto of the supported version.

    Errors: `PyptoInstallError` if there is none, if it is the other project, or another version.
    """
    spec = importlib.util.find_spec("pypto")
    if spec is None:
        raise PyptoInstallError("import pypto", "no package of that name", _EXPECTED)
    directories = [Path(location) for location in spec.submodule_search_locations or ()]
    for package in directories:
        if _has(package, "pypto_impl*.so", "frontend"):
            version = _version_beside(package)
            if version != SUPPORTED_VERSION:
                raise PyptoInstallError(f"pypto in {package}", f"version {version}", _EXPECTED_INSTEAD)
            return PyptoInstall(package, version)
        if _has(package, "pypto_core*.so", "language"):
            raise PyptoInstallError(f"pypto in {package}", "the other project of that name", _EXPECTED_INSTEAD)
    found = f"neither pypto_impl*.so and frontend/ nor pypto_core*.so and language/ in {spec.origin or directories}"
    raise PyptoInstallError("import pypto", found, _EXPECTED_INSTEAD)


def _has(package: Path, library: str, subpackage: str) -> bool:
    return any(package.glob(library)) and (package / subpackage).is_dir()


def _version_beside(package: Path) -> str:
    """Version of the distribution that is installed next to `package`, not of any other on the path."""
    beside = distributions(name="pypto", path=[str(package.parent)])
    return next((found.version for found in beside), "unknown (no metadata beside it)")
