"""The parent's side of the worker: start it, ask it, notice how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import site
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from v41_kernels import errors
from v41_kernels.errors import KernelCrashError, KernelError, KernelExecutionError, KernelTimeoutError
from v41_kernels.platforms import Platform

_START_SECONDS = 120.0  # importing torch and pypto takes 2 s; a loaded machine is given much more
_DEVICE_START_SECONDS = 600.0  # the device's libraries and, for the canary, the device's compiler
_STOP_SECONDS = 5.0
LONGEST_TIMEOUT = 7 * 24 * 3600.0
"""Seconds; the system cannot wait for an infinite time."""


def checked_timeout(seconds: float) -> float:
    """The seconds that a launch may take. Errors: `KernelError` unless they are positive and not more than a week."""
    if not 0 < seconds <= LONGEST_TIMEOUT:
        raise KernelError("timeout", seconds, f"more than 0 and at most {LONGEST_TIMEOUT:.0f} seconds")
    return seconds


class WorkerProcess:
    """One running worker with a scratch directory of its own, which lives as long as it does."""

    def __init__(self, platform: Platform, calculator: Path | None, compiler: Path | None = None) -> None:
        """Starts the worker and waits for its canary; the CPU's needs the built interpreter.

        With `compiler`, a directory to import pypto from, it is a worker that compiles and executes nothing, and there
        is no canary.

        Errors: `CanaryError`, `PlatformError`, `PyptoInstallError`, `KernelCrashError`, `KernelTimeoutError`.
        """
        self._directory = tempfile.TemporaryDirectory(prefix="v41-kernels-", ignore_cleanup_errors=True)
        self.scratch = Path(self._directory.name)
        self._log = self.scratch / "worker.log"
        read_end, write_end = os.pipe()
        self._replies = open(read_end, "rb", buffering=0)  # noqa: SIM115 - open for the object's life
        self._unread = b""
        command = [sys.executable, "-m", *_program(platform, calculator, compiler)]
        command += ["--scratch", str(self.scratch), "--replies", str(write_end)]
        try:
            with open(self._log, "wb") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self.scratch,
                    env=_environment(self.scratch, platform, compiler),
                    pass_fds=(write_end,),
                    start_new_session=True,
                )
        finally:
            os.close(write_end)
        try:
            start_seconds = _DEVICE_START_SECONDS if platform.is_device else _START_SECONDS
            self._receive("kernel worker", start_seconds)
        except BaseException:
            self._kill()
            self.stop()
            raise

    def ask(self, where: str, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Sends a request and waits for its answer; after any error the worker has been stopped.

        Errors: `KernelExecutionError` or a subclass; `where` names the kernel.
        """
        try:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has died: reading the answer finds out how
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
            return self._receive(where, timeout)
        except BaseException:  # also an interrupt: a late answer must not be taken for the next one
            self._kill()
            self.stop()
            raise

    def stop(self) -> None:
        """Lets an idle worker end by itself, and removes its directory."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
        self._replies.close()
        self._directory.cleanup()

    def _receive(self, where: str, timeout: float) -> dict[str, Any]:
        line = self._read_line(where, timeout)
        if line is None:
            raise KernelCrashError(where, f"{self._how_it_ended()}; log ends in: {self._log_end()}", "an answer")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise _error(where, answer["error"])
        return answer

    def _read_line(self, where: str, timeout: float) -> bytes | None:
        """The next line, or None if the worker ended without one."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._replies], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._kill()
                raise KernelTimeoutError(where, f"no answer after {timeout:g} s; it was stopped", "an answer in time")
            received = self._replies.read(65536)
            if not received:
                return None
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # a session of its own: the group holds nothing else
            self._process.wait()

    def _how_it_ended(self) -> str:
        status = self._process.wait()
        if status < 0:
            return f"worker killed by {signal.Signals(-status).name}"
        return f"worker ended with status {status}"

    def _log_end(self) -> str:
        return self._log.read_bytes()[-200:].decode(errors="replace").strip() or "(empty)"


def _program(platform: Platform, calculator: Path | None, compiler: Path | None) -> tuple[str, ...]:
    if compiler is not None:
        return ("v41_kernels.compile_worker",)
    if calculator is None:
        return ("v41_kernels.worker", "--device-id", str(platform.device_id))
    return ("v41_kernels.worker", "--calculator", str(calculator))


def _environment(scratch: Path, platform: Platform, compiler: Path | None) -> dict[str, str]:
    """The worker's variables: whatever pypto writes goes below `scratch`; CANN's are passed on to a device's worker."""
    environment = dict(os.environ)
    if compiler is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(compiler), environment.get("PYTHONPATH"))))
    if not platform.is_device:
        # With CANN pypto loads another runtime, for which the interpreter was not written.
        environment.pop("ASCEND_HOME_PATH", None)
    return environment | {
        "HOME": str(scratch),  # pypto writes ~/.pypto
        "PYTHONUSERBASE": site.getuserbase(),  # or packages that are installed for the user would be gone with the home
        "TILE_FWK_OUTPUT_DIR": str(scratch / "output"),
        "ASCEND_PROCESS_LOG_PATH": str(scratch / "log"),
        "ASCEND_WORK_PATH": str(scratch),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        # The C library gives freed tensors back to the system at once: they count against the worker's limit.
        "MALLOC_MMAP_THRESHOLD_": "262144",
    }


def _error(where: str, described: dict[str, Any]) -> KernelError:
    """The error that the worker described."""
    if described["type"] is None:
        return KernelExecutionError(where, described["found"], "a kernel that compiles and runs")
    kind = getattr(errors, described["type"], KernelError)
    error: KernelError = kind(described["where"], described["found"], described["expected"])
    return error
