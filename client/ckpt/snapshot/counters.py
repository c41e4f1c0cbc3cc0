"""Save counters of one Checkpointer, for metrics exporters."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals over the saves of this rank so far, and what waits to be carried far."""

    committed: int = 0
    failed: int = 0
    skipped: int = 0
    """Skipped because of `on_busy`, on this rank or another one."""
    raw_bytes: int = 0
    """Size of this rank's part of committed saves before encoding."""
    stored_bytes: int = 0
    """Bytes uploaded."""
    referenced_bytes: int = 0
    """Stored bytes of unchanged chunks, which lie in earlier checkpoints. Not included in stored_bytes."""
    blocked_s: float = 0.0
    """The training thread was inside save_async."""
    wait_s: float = 0.0
    """Part of blocked_s: waiting for an idle slot."""
    cpu_s: float = 0.0
    """CPU time of the saver process for committed saves."""
    store_retries: int = 0
    """Requests of the saver that were repeated, because the store did not answer."""
    last_durable_step: int | None = None
    """The highest committed step."""
    near_only: int = 0
    """On rank 0, with a near store: checkpoints of the run that are to be carried to the far store, now."""
    near_only_bytes: int = 0
    near_only_since: float | None = None
    """When the oldest of them was committed near, in seconds since the epoch; None: there is none."""


class LiveCounters:
    """The Counters of a running Checkpointer. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = Counters()

    @property
    def counters(self) -> Counters:
        """The current totals."""
        return self._counters

    def add(self, **amounts: float) -> None:
        """Add amounts to the counters of these names."""
        with self._lock:
            sums = {name: getattr(self._counters, name) + amount for name, amount in amounts.items()}
            self._counters = replace(self._counters, **sums)

    def near_only(self, checkpoints: int, num_bytes: int, since: float | None) -> None:
        """Record the checkpoints that are to be carried to the far store."""
        with self._lock:
            self._counters = replace(
                self._counters, near_only=checkpoints, near_only_bytes=num_bytes, near_only_since=since
            )

    def durable(self, step: int) -> None:
        """Record that a step is committed."""
        with self._lock:
            last = self._counters.last_durable_step
            self._counters = replace(self._counters, last_durable_step=step if last is None else max(last, step))
