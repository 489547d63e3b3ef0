"""PyPTO inside the worker process: imported without side effects, its files kept apart, its failures typed."""

from __future__ import annotations

import glob
import importlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from v41_kernels.errors import KernelExecutionError
from v41_kernels.pypto_install import find_pypto

_OUTPUT_VARIABLE = "TILE_FWK_OUTPUT_DIR"  # read by the C++ core at the start of every compilation


class CompilerSession:
    """The compiler, for one kernel after the other; of no use any more once one has failed."""

    def __init__(self, scratch: Path) -> None:
        """Imports pypto. `scratch` takes all files that it writes.

        Errors: `PyptoInstallError`; `OSError` where a library that it loads is not there.
        """
        find_pypto()
        with contained_import():
            self.pypto: Any = importlib.import_module("pypto")
        self._scratch = scratch

    def compiled(self, entry: Callable[..., None], **options: object) -> Any:
        """The entry with pypto's decorator applied; it is compiled by its first call, which takes its tensors."""
        return _wrap(self.pypto.frontend.jit(use_cache=False, **options), entry)

    @contextmanager
    def failures(self, where: str, expected: str) -> Iterator[None]:
        """Whatever is raised in it becomes a `KernelExecutionError` with the cause that the compiler logged first."""
        logged, recording = self._log_sizes(), _FirstError()
        root = logging.getLogger()
        root.addHandler(recording)
        try:
            yield
        except Exception as error:
            cause = recording.message or self._first_logged_error(logged) or f"{type(error).__name__}: {error}"
            raise KernelExecutionError(where, _without_frames(cause), expected) from error
        finally:
            root.removeHandler(recording)

    @contextmanager
    def output_directory(self) -> Iterator[Path]:
        """A directory of its own for what one compilation writes, removed afterwards."""
        before = os.environ.get(_OUTPUT_VARIABLE)
        directory = Path(tempfile.mkdtemp(prefix="run-", dir=self._scratch))
        os.environ[_OUTPUT_VARIABLE] = str(directory)
        try:
            yield directory
        finally:
            if before is None:
                del os.environ[_OUTPUT_VARIABLE]
            else:
                os.environ[_OUTPUT_VARIABLE] = before
            shutil.rmtree(directory, ignore_errors=True)

    def _log_sizes(self) -> dict[Path, int]:
        return {log: log.stat().st_size for log in self._scratch.rglob("pypto-log-*.log")}

    def _first_logged_error(self, before: dict[Path, int]) -> str | None:
        """What the compiler logged first since `before`: the cause, where its exception names a consequence."""
        for log in self._log_sizes():
            with open(log, encoding="utf-8", errors="replace") as file:
                file.seek(before.get(log, 0))
                for line in file:
                    # [ERROR] PYPTO(1):2026-11-30 03:10:48 [schedule_base.h:358][PASS]:the message; the verifier logs as
                    # an error, too, that values differ from the stand-ins.
                    if "[ERROR]" in line and "[VERIFY]" not in line:
                        return line.split("]:", 1)[-1].strip()
        return None


def parameters(entry: Callable[..., None]) -> tuple[str, ...]:
    """Names of an entry's parameters, in their order."""
    code = entry.__code__
    return code.co_varnames[: code.co_argcount]


def graph_operations(where: str, output: Path) -> Counter[str]:
    """Operations of the graph that one compilation left in its output directory, counted by their names.

    Errors: `KernelExecutionError`.
    """
    program = json.loads(the_only_file(where, f"{output}/output_*/program.json").read_text())
    return Counter(operation["opcode"] for function in program["functions"] for operation in function["operations"])


def the_only_file(where: str, pattern: str) -> Path:
    """The one file of that pattern. Errors: `KernelExecutionError` if there is another number of them."""
    found = glob.glob(pattern)
    if len(found) != 1:
        raise KernelExecutionError(where, f"{len(found)} of {Path(pattern).name}", "one, written by pypto")
    return Path(found[0])


@contextmanager
def contained_import() -> Iterator[None]:
    """Undoes what importing pypto does to the process: a root log handler at DEBUG level, a changed `os.environ`."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    environ, variables = os.environ, dict(os.environ)
    try:
        yield
    finally:
        root.setLevel(level)
        for handler in [handler for handler in root.handlers if handler not in handlers]:
            root.removeHandler(handler)
        os.environ = environ  # noqa: B003 - pypto replaces the object, we put the old one back
        if dict(environ) != variables:
            environ.clear()
            environ.update(variables)


class _FirstError(logging.Handler):
    """The first error that pypto's Python half logs: why an entry could not be recorded, where what it raises in the
    end is about something that was left undone."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.message: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.message is None:
            self.message = record.getMessage()


def _without_frames(message: str) -> str:
    """A message of pypto without the pages of C++ frames behind it."""
    return " ".join(re.split(r"lib\w+(?:\.so)?\(", message, maxsplit=1)[0].split())


def _wrap(jit: Callable[[Callable[..., None]], Callable[..., None]], entry: Callable[..., None]) -> Callable[..., None]:
    """Applies the decorator where no other name is in reach: pypto lets the local variables of the function that
    applies it shadow the kernel's own globals."""
    return jit(entry)
