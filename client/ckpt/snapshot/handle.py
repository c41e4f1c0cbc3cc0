"""What the trainer knows of one save under way."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

from ckpt.saver.streaming import StreamWriter
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CkptError, SaveSkipped


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of a save went, in seconds, and its size. Zero until known."""

    blocked_s: float = 0.0
    """The training thread was inside save_async."""
    wait_s: float = 0.0
    """Of that, waiting for an idle slot."""
    stage_s: float = 0.0
    """Of that, copying."""
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
    """Of this rank's part, before it is encoded."""
    stored_bytes: int = 0
    """What was uploaded."""
    referenced_bytes: int = 0
    """Stored bytes of unchanged chunks, which lie in earlier checkpoints; in addition to stored_bytes."""


class SaveHandle:
    """One save. All methods may be called from any thread."""

    def __init__(self, step: int, raw_bytes: int, begun_at: float | None = None) -> None:
        """begun_at: when save_async was called, by time.perf_counter()."""
        self.step = step
        self._begun_at = time.perf_counter() if begun_at is None else begun_at
        self._lock = threading.Lock()
        self._staged = threading.Event()
        self._lost = False
        self._finished = threading.Event()
        self._checkpoint: Checkpoint | None = None
        self._error: CkptError | None = None
        self._seen = False
        self._done_bytes = 0
        self._timings = Timings(raw_bytes=raw_bytes)
        self._stream_writer: StreamWriter | None = None

    def __repr__(self) -> str:
        ended = "skipped" if self.skipped else "failed" if self._error else "committed"
        state = ended if self.done() else "under way"
        return f"<SaveHandle step={self.step} {state}>"

    def staged(self, timeout: float | None = 0.0) -> bool:
        """Whether the snapshot is taken and in the saver's hands: from then on it becomes durable even if this process
        is killed. Waits at most `timeout` seconds for it, None: without limit; False if the save failed before."""
        return self._staged.wait(timeout) and not self._lost

    def done(self) -> bool:
        """Whether it is committed, has failed or was skipped."""
        return self._finished.is_set()

    def result(self, timeout: float | None = None) -> Checkpoint:
        """The committed checkpoint: durable, and restorable by anybody.

        Waits at most `timeout` seconds, then raises TimeoutError; raises the save's own error if it failed, and
        SaveSkipped if it was given up as `on_busy` asks for.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"save of step {self.step} is not durable after {timeout} s")
        if (error := self.exception()) is not None:
            raise error
        assert self._checkpoint is not None
        return self._checkpoint

    def exception(self) -> CkptError | None:
        """The error of a save that failed or was skipped; None while it is under way or committed.

        An error that was seen here is not raised again by the next save.
        """
        self._seen = True
        return self._error

    @property
    def skipped(self) -> bool:
        """Whether it was given up as `on_busy` asks for, by this rank or another one. That is no failure."""
        return isinstance(self._error, SaveSkipped)

    @property
    def timings(self) -> Timings:
        """What is known so far."""
        return self._timings

    @property
    def progress(self) -> tuple[int, int]:
        """Raw bytes uploaded by this rank, and all of them."""
        return self._done_bytes, self._timings.raw_bytes

    # For the client only.

    @property
    def _unseen_error(self) -> CkptError | None:
        return None if self._seen or self.skipped else self._error

    def _advance(self, done_bytes: int) -> None:
        self._done_bytes = done_bytes
        if self._stream_writer is not None:
            self._stream_writer.written(done_bytes)

    @property
    def _age_s(self) -> float:
        return time.perf_counter() - self._begun_at

    def _measure(self, **known: float) -> None:
        # The training thread and the writer's threads learn different parts.
        with self._lock:
            self._timings = replace(self._timings, **known)  # type: ignore[arg-type]

    def _hand_over(self) -> None:
        self._staged.set()

    def _succeed(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._done_bytes = self._timings.raw_bytes
        self._finished.set()

    def _fail(self, error: CkptError) -> None:
        self._error = error
        self._seen = False
        if self._stream_writer is not None:
            self._stream_writer.fail(error)
        self._lost = not self._staged.is_set()
        self._staged.set()
        self._finished.set()
