"""The parts of a snapshot, and which of them are copied: an optimizer waits for some. Does not import torch."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

Part = frozenset[int]
"""The numbers of the optimizers that change some leaves of a save, and wait for their copies."""
EVERYONE: Part = frozenset()
"""The part of the leaves that every optimizer waits for."""


class CopyProgress:
    """Which parts of one snapshot are copied. For any thread."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self._copied = {part: threading.Event() for part in parts}
        self._wanted: set[Part] = set()

    def wait_for(self, parts: Iterable[Part]) -> None:
        """Return when these parts are copied, or the copy has failed. They are copied before others."""
        self._wanted.update(parts)
        for part in parts:
            self._copied[part].wait()

    def next(self, left: Mapping[Part, Any]) -> Part:
        """The part among these to copy next."""
        return next((part for part in left if part in self._wanted), next(iter(left)))

    def copied(self, part: Part) -> None:
        """A part is copied."""
        self._copied[part].set()

    def end(self) -> None:
        """No optimizer waits for the copy any more."""
        for event in self._copied.values():
            event.set()
