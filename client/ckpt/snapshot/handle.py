"""SaveHandle and Counters: what the training loop sees of one save, and of all; and how ckpt updates them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CkptError, SaveSkipped
from ckptstore.threads import Latch
from ckptstore.values import Value


def time_left(timeout_s: float | None) -> Callable[[], float | None]:
    """The seconds of a timeout that are left at each call, at least 0; None: without limit."""
    if timeout_s is None:
        return lambda: None
    end = time.monotonic() + timeout_s
    return lambda: max(0.0, end - time.monotonic())


class Timings(Value):
    """Where the time of a save went, in seconds, and its size. Fields are zero until they are known."""

    blocked_s: float = 0.0
    """The training thread was inside save_async."""
    wait_s: float = 0.0
    """Part of blocked_s: waiting for an idle slot."""
    stage_s: float = 0.0
    """Part of blocked_s: copying. With overlap, the copy runs in the background instead."""
    held_s: float = 0.0
    """`optim.step()` waited for the rest of the copy."""
    queue_s: float = 0.0
    """The snapshot waited for earlier ones."""
    encode_s: float = 0.0
    """The upload waited for encoded chunks."""
    upload_s: float = 0.0
    commit_s: float = 0.0
    """From this rank's receipt to the commit of all ranks."""
    cpu_s: float = 0.0
    """CPU time of the saver process from the end of the queue until the shard was durable; 0 with writer="thread"."""
    raw_bytes: int = 0
    """Size of this rank's part before encoding."""
    stored_bytes: int = 0
    """Bytes uploaded."""
    referenced_bytes: int = 0
    """Stored bytes of unchanged chunks, which lie in earlier checkpoints. Not included in stored_bytes."""


class SaveHandle:
    """One save. All methods may be called from any thread."""

    def __init__(self, step: int, raw_bytes: int) -> None:
        self.step = step
        self._staged = Latch()
        self._lost = False
        self._finished = Latch()
        self._checkpoint: Checkpoint | None = None
        self._error: CkptError | None = None
        self._seen = False
        self._done_bytes = 0
        self._begun_at = self._progressed_at = math.inf
        self._ended_at = -math.inf
        self._timings = Timings(raw_bytes=raw_bytes)

    def __repr__(self) -> str:
        ended = "skipped" if self.skipped else "failed" if self._error else "committed"
        state = ended if self.done() else "under way"
        return f"<SaveHandle step={self.step} {state}>"

    def staged(self) -> bool:
        """Whether the saver has the whole snapshot; does not wait, like `done`.

        From then on it becomes durable even if this process is killed. False while it is copied, and if the save failed
        before. `wait_staged` waits for it.
        """
        return self._staged.is_set() and not self._lost

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Wait until the saver has the whole snapshot, or the save has failed; returns `staged()`.

        Waits at most `timeout` seconds, None: without limit.
        """
        self._staged.wait(timeout)
        return self.staged()

    def done(self) -> bool:
        """Whether the save is committed, failed or skipped."""
        return self._finished.is_set()

    def result(self, timeout: float | None = None) -> Checkpoint:
        """The committed checkpoint: durable, and visible to every reader of the store.

        Waits at most `timeout` seconds, then raises TimeoutError. Raises the save's own error if it failed, and
        SaveSkipped if it was skipped because of `on_busy`.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"save of step {self.step} is not durable after {timeout} s")
        if (error := self.exception()) is not None:
            raise error
        assert self._checkpoint is not None
        return self._checkpoint

    def exception(self) -> CkptError | None:
        """The error of a save that failed or was skipped; None while it is under way or committed.

        After this call the next save does not raise the error.
        """
        self._seen = True
        return self._error

    @property
    def committed(self) -> bool:
        """Whether the checkpoint exists."""
        return self._checkpoint is not None

    @property
    def skipped(self) -> bool:
        """Whether the save was skipped because of `on_busy`, on this rank or another one. This is not a failure."""
        return isinstance(self._error, SaveSkipped)

    @property
    def timings(self) -> Timings:
        """The timings known so far."""
        return self._timings

    @property
    def progress(self) -> tuple[int, int]:
        """Raw bytes uploaded by this rank, and their total."""
        return self._done_bytes, self._timings.raw_bytes

    @property
    def since_begin_s(self) -> float:
        """Seconds since the saver has the whole snapshot, or has uploaded a part of it; before that 0."""
        return max(0.0, time.perf_counter() - self._begun_at)

    @property
    def since_end_s(self) -> float:
        """Seconds since the save was committed; infinite before."""
        return time.perf_counter() - self._ended_at

    @property
    def since_progress_s(self) -> float:
        """Seconds since `progress` last changed, or since the saver has the whole snapshot; before that 0."""
        return max(0.0, time.perf_counter() - self._progressed_at)


class LiveHandle(SaveHandle):
    """A SaveHandle with the methods by which ckpt updates it, from any thread."""

    def __init__(self, step: int, raw_bytes: int, started_at: float) -> None:
        """started_at: when save_async was called, by time.perf_counter()."""
        super().__init__(step, raw_bytes)
        self._started_at = started_at
        self._lock = threading.Lock()

    @property
    def age_s(self) -> float:
        """Seconds since save_async was called."""
        return time.perf_counter() - self._started_at

    @property
    def error(self) -> CkptError | None:
        """As `exception`, but the error counts as not read."""
        return self._error

    @property
    def unseen_error(self) -> CkptError | None:
        """The error, unless user code has read it or the save was skipped."""
        return None if self._seen or self.skipped else self._error

    def measure(self, **timings: float) -> None:
        """Set fields of the timings."""
        # The training thread and the writer's threads set different fields.
        with self._lock:
            self._timings = msgspec.structs.replace(self._timings, **timings)

    def uploaded(self, done_bytes: int) -> None:
        """This many raw bytes are uploaded."""
        self._done_bytes = done_bytes
        self._note_progress()

    def wait_ended(self, timeout: float | None = None) -> None:
        """Wait until the save is committed, failed or skipped; its error counts as not read."""
        self._finished.wait(timeout)

    def mark_staged(self) -> None:
        """The saver has the whole snapshot."""
        if not self._staged.is_set():
            self._note_progress()
            self._staged.set()

    def _note_progress(self) -> None:
        self._progressed_at = time.perf_counter()
        self._begun_at = min(self._begun_at, self._progressed_at)

    def succeed(self, checkpoint: Checkpoint) -> None:
        """The checkpoint is committed."""
        self._checkpoint = checkpoint
        self._done_bytes = self._timings.raw_bytes
        self._ended_at = time.perf_counter()
        self._finished.set()

    def fail(self, error: CkptError) -> None:
        """The save failed or was skipped."""
        self._error = error
        self._seen = False
        self._lost = not self._staged.is_set()
        self._staged.set()
        self._finished.set()


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals over the saves of this rank so far, and what waits to be replicated."""

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
    local_only: int = 0
    """On rank 0, with a local tier: checkpoints of the run that are to be replicated to the remote store, now."""
    local_only_bytes: int = 0
    local_only_since: float | None = None
    """When the oldest of them was committed locally, in seconds since the epoch; None: there is none."""


class LiveCounters:
    """The Counters of a running Checkpointer. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counters = Counters()
        """The current totals."""

    def add(self, **amounts: float) -> None:
        """Add amounts to the counters of these names."""
        with self._lock:
            sums = {name: getattr(self.counters, name) + amount for name, amount in amounts.items()}
            self.counters = replace(self.counters, **sums)

    def set(self, **values: Any) -> None:
        """Set the counters of these names."""
        with self._lock:
            self.counters = replace(self.counters, **values)

    def durable(self, step: int) -> None:
        """Record that a step is committed."""
        with self._lock:
            highest = max(self.counters.last_durable_step or 0, step)
            self.counters = replace(self.counters, last_durable_step=highest)
