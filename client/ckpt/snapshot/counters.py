"""Counters of one Checkpointer, for people to export to whatever they watch their training with. No torch."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Counters:
    """What became of the saves of this rank so far."""

    committed: int = 0
    failed: int = 0
    skipped: int = 0
    """Given up as `on_busy` asks for, by this rank or another one."""
    raw_bytes: int = 0
    """Of this rank's part of committed saves."""
    stored_bytes: int = 0
    """What was uploaded."""
    referenced_bytes: int = 0
    """Stored bytes of unchanged chunks, which lie in earlier checkpoints; in addition to stored_bytes."""
    blocked_s: float = 0.0
    """The training thread was inside save_async."""
    wait_s: float = 0.0
    """Of that, waiting for an idle slot."""
    cpu_s: float = 0.0
    """CPU time that the saver process took for committed saves."""
    last_durable_step: int | None = None
    """The highest step that was committed."""


class LiveCounters:
    """Counts, in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = Counters()

    @property
    def counters(self) -> Counters:
        """By now."""
        return self._counters

    def add(self, **amounts: float) -> None:
        """Add to counters, by name."""
        with self._lock:
            sums = {name: getattr(self._counters, name) + amount for name, amount in amounts.items()}
            self._counters = replace(self._counters, **sums)

    def durable(self, step: int) -> None:
        """A step is committed."""
        with self._lock:
            last = self._counters.last_durable_step
            self._counters = replace(self._counters, last_durable_step=step if last is None else max(last, step))
