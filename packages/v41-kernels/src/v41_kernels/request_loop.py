"""What the worker processes share: one JSON request a line from standard input, one answer a line on a descriptor.

After a failed kernel a worker answers and ends, since pypto refuses all work after a failure.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from v41_config import V41Error

Request = dict[str, Any]
Answer = dict[str, Any]

_MESSAGE_CHARACTERS = 290


def serve(replies: int, scratch: Path, start: Callable[[], Callable[[Request], Answer]]) -> int:
    """Starts, answers `{}` and then every request until standard input ends; an exit status, 1 after a failure.

    Args:
        replies: the descriptor for the answers.
        scratch: a directory that is removed at the end.
        start: gives what executes requests.
    """
    os.set_inheritable(replies, False)  # so that its end is seen when this process dies
    try:
        # A broken pipe: the executor's process is gone, and nobody waits for an answer or tidies up.
        with contextlib.suppress(BrokenPipeError), open(replies, "w", encoding="utf-8") as answers:
            return _serve(answers, start)
        return 1
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _serve(answers: TextIO, start: Callable[[], Callable[[Request], Answer]]) -> int:
    try:
        execute = start()
        _answer(answers, {})
        for line in sys.stdin:
            _answer(answers, execute(json.loads(line)))
    except BrokenPipeError:
        raise
    except Exception as error:  # whatever it is, the parent names the kernel and raises it
        _answer(answers, {"error": _describe(error)})
        return 1
    return 0


@functools.cache
def kernel_entry(kernel: str, static: tuple[tuple[str, object], ...]) -> Callable[..., None]:
    """A kernel module's entry for these sizes and constants, always the same one; it takes those that it names."""
    make_entry = importlib.import_module(kernel).make_entry
    taken = inspect.signature(make_entry).parameters
    entry: Callable[..., None] = make_entry(**{name: value for name, value in static if name in taken})
    return entry


def _describe(error: Exception) -> dict[str, Any]:
    if isinstance(error, V41Error):
        found = error.found if isinstance(error.found, (str, int, float)) else repr(error.found)
        return {"type": type(error).__name__, "where": error.where, "found": found, "expected": error.expected}
    return {"type": None, "found": f"{type(error).__name__}: {error}"[:_MESSAGE_CHARACTERS]}


def _answer(answers: TextIO, answer: Answer) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
