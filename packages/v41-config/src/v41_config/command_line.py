"""How every `v41-*` command ends: its exit code, and one line on standard error for what is wrong."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from v41_config.errors import V41Error

BAD_INPUT = 2
"""Exit code of every typed error, as of argparse; 1 is left to a command whose answer is no."""

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a command that was stopped from the keyboard."""

TERMINATED = 128 + signal.SIGTERM
"""Exit code of a command that was told to end."""


class _Termination(BaseException):
    """SIGTERM as an exception, so that whatever is half written is cleaned up on the way out."""


def run_command(program: str, command: Callable[[], int | None]) -> int:
    """Run a command to its end: the process's exit code. None is 0.

    A `V41Error` is one line on standard error, `program` before it. Ctrl-C and SIGTERM unwind the command, and so clean
    up behind it, without a traceback. A reader that has seen enough (`head`, say) is no error; a standard output that
    takes no bytes is one, and so is a path that the system refuses to look at.
    """
    try:
        with _termination_raised():
            code = command()
            sys.stdout.flush()
    except V41Error as error:
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:
        _discard_output()
        return 0
    except OSError as error:
        if error.filename is not None:  # a path that could not even be looked at: a name too long, no permission
            found = f"{program}: {error.filename}: expected a path that can be used, found {error.strerror}"
            print(" ".join(found.split()), file=sys.stderr)
            return BAD_INPUT
        _discard_output()
        print(f"{program}: standard output: expected a file that can be written, found {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except _Termination:
        return TERMINATED
    return code or 0


@contextmanager
def _termination_raised() -> Iterator[None]:
    """SIGTERM raises once; where something else handles it already, or in another thread than the main one, it does
    what it did."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    if before != signal.SIG_DFL:
        yield
        return

    def terminate(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # the clean-up is not to be interrupted
        raise _Termination

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _discard_output() -> None:
    """What is still buffered goes nowhere: Python would try once more to write it at exit, and fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
