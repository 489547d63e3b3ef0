"""How commands end: exit codes, one line for what is wrong, and no traceback when they are stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from v41_config import V41Error
from v41_config.command_line import BAD_INPUT, INTERRUPTED, TERMINATED, run_command


def test_the_command_decides() -> None:
    assert [run_command("x", lambda code=code: code) for code in (None, 0, 1, 7)] == [0, 0, 1, 7]  # type: ignore[misc]


def test_an_error_is_one_line_whatever_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> NoReturn:
        raise V41Error("a\nb", "c", "d\n  e")

    assert run_command("prog", command) == BAD_INPUT == 2
    assert capsys.readouterr().err == "prog: a b: expected d e, found 'c'\n"


def test_a_path_that_the_system_refuses_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    name = "z" * 300
    assert run_command("x", lambda: len(Path(name).read_text())) == BAD_INPUT
    assert capsys.readouterr().err == f"x: {name}: expected a path that can be used, found File name too long\n"


def test_other_exceptions_are_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        run_command("x", lambda: 1 // 0)


def test_ctrl_c_and_sigterm_clean_up(capsys: pytest.CaptureFixture[str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a script start without it
    cleaned: list[int] = []
    before = signal.getsignal(signal.SIGTERM)

    def stopped_by(number: int) -> int:
        def command() -> None:
            try:
                os.kill(os.getpid(), number)
                threading.Event().wait(10)
            finally:
                os.kill(os.getpid(), signal.SIGTERM) if number == signal.SIGTERM else None  # a second one is ignored
                cleaned.append(number)

        return run_command("x", command)

    assert stopped_by(signal.SIGINT) == INTERRUPTED == 130
    assert stopped_by(signal.SIGTERM) == TERMINATED == 143
    assert cleaned == [signal.SIGINT, signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before
    assert capsys.readouterr().err == ""


def test_a_handler_that_stands_is_left_alone_and_threads_have_none() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        assert run_command("x", lambda: os.kill(os.getpid(), signal.SIGTERM)) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(run_command("x", lambda: 3)))
    thread.start()
    thread.join()
    assert codes == [3]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_standard_output_is_an_error() -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "v41_config", "schema"]
        found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert found.returncode == 2
    assert found.stderr.startswith("v41-config: standard output: expected a file that can be written")
    assert found.stderr.count("\n") == 1
