"""How much memory of its own a process takes, without pages of files that the kernel can take back."""

from __future__ import annotations

import re
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

_EVERY_S = 0.005


class PeakMemory:
    """The most anonymous memory that a process had while this context was entered; looks 200 times a second."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.bytes = 0
        self._status = Path(f"/proc/{process.pid}/status")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def look(self) -> None:
        """Look once more."""
        found = re.search(r"RssAnon:\s+(\d+) kB", self._status.read_text())
        self.bytes = max(self.bytes, int(found[1]) << 10 if found else 0)

    def _watch(self) -> None:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has been waited for
            while not self._stop.wait(_EVERY_S):
                self.look()
