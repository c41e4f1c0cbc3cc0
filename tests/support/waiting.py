"""Waiting for an event with a generous limit: a slow machine takes longer, and only what never happens fails.

Also: values that must be there, and the files that a process has open.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar

DEADLINE_S = 120.0
_T = TypeVar("_T")


def present(value: _T | None) -> _T:
    """The value, which is not None."""
    assert value is not None
    return value


def wait_until(condition: Callable[[], object], what: str = "it", deadline_s: float = DEADLINE_S) -> None:
    """Poll until the condition holds, the longer it takes the less often; AssertionError if it never does.

    A file that another process removes while the condition looks at it means: not yet.
    """
    began = time.monotonic()
    while not _holds(condition):
        took = time.monotonic() - began
        assert took < deadline_s, f"{what} did not happen within {deadline_s} s"
        time.sleep(min(0.1, max(0.01, took / 20)))


def _holds(condition: Callable[[], object]) -> object:
    try:
        return condition()
    except FileNotFoundError:
        return False


def open_files(process: int | str = "self") -> dict[Path, str]:
    """What the descriptors of a process lead to, less those that it closes in the meantime."""
    found = {}
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):
            found[descriptor] = str(descriptor.readlink())
    return found


class Lines:
    """The lines that a process prints, read by a thread: no line and no end is waited for without a limit."""

    def __init__(self, pipe: IO[Any] | None) -> None:
        assert pipe is not None, "the process has no pipe"
        self._lines: queue.Queue[str] = queue.Queue()
        # A file of its own: closing one would wait for its reader.
        source = open(os.dup(pipe.fileno()))  # noqa: SIM115 - closed by the thread
        threading.Thread(target=self._read, args=(source,), name="lines", daemon=True).start()

    def _read(self, source: IO[str]) -> None:
        with source:
            for line in source:
                self._lines.put(line)
        self._lines.put("")

    def next(self, deadline_s: float = DEADLINE_S) -> str:
        """The next line, or an empty string at the end; AssertionError if neither comes."""
        try:
            return self._lines.get(timeout=deadline_s)
        except queue.Empty:
            raise AssertionError(f"nothing was printed for {deadline_s} s") from None

    def come_within(self, seconds: float) -> bool:
        """Whether there is something to read, after a wait of `seconds` at most."""
        end = time.monotonic() + seconds
        while self._lines.empty() and time.monotonic() < end:
            time.sleep(0.01)
        return not self._lines.empty()
