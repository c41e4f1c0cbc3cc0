"""Overlap: training continues while its state is copied. The optimizer waits for the copy before it changes anything.

State that changes only in `optim.step()` (parameters and optimizer state) is copied by another thread, or by the GPU
itself, during the next forward and backward. A hook before the step of any optimizer waits for the copy: on a GPU the
stream waits, not the CPU. A ChangeGuard detects state that was changed in another way while it was copied.

    unchanged               the job is submitted to the saver
    changed, before a step  the state is copied again, since before the step it is still that of the save; overlap ends
    changed, otherwise      the save fails with SnapshotTorn; overlap ends
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt.capture.leaves import Captured, Change, Leaf
from ckpt.snapshot.client import SaveClient
from ckpt.snapshot.guard import FROZEN_BYTES, ChangeGuard, FrozenTracker
from ckpt.snapshot.request import Snapshot
from ckptstore.errors import CkptError, SaveFailed, SnapshotTorn
from ckptstore.format.shards import Placed

logger = logging.getLogger(__name__)

_SMALL_BYTES = 16 << 10
"""Smaller tensors in host memory are copied at once: handing them to another thread takes as long."""
_NAMED = 3


class BackgroundCopy(Protocol):
    """The copy of one snapshot. `copy` and `finish` run on the copier thread, the others on the training thread."""

    @property
    def frozen(self) -> Sequence[Placed]:
        """The copies in the slot of large leaves that are expected not to change."""

    def copy(self) -> None:
        """Copy host memory, and start the copies of GPUs."""

    def make_streams_wait(self) -> None:
        """Order later work of the current GPU streams after the copy. Does not wait. Call it after `copy`."""

    def copy_again(self) -> None:
        """Copy the deferred leaves again, with their current values. Call it after `copy`."""

    def finish(self) -> None:
        """Return when the slot holds everything. Raises SnapshotTorn if it would have to be copied again but cannot."""

    def release(self) -> None:
        """Release the tensors; nothing will be copied again. Call it after `finish`."""


@dataclass(slots=True)
class PendingCopy:
    """A snapshot that is being copied in the background."""

    transfer: BackgroundCopy
    guard: ChangeGuard | None
    """None once it has been checked."""
    snapshot: Snapshot
    copied: threading.Event = field(default_factory=threading.Event)
    """Set once host memory is copied and the GPUs' copies are enqueued, or the copy has failed."""
    step_reached: bool = False
    """An optimizer is about to step, or has stepped, since the save."""
    error: BaseException | None = None
    future: Future[None] | None = None
    _changed: list[str] = field(default_factory=list)
    _checking: threading.Lock = field(default_factory=threading.Lock)

    def changed_entries(self) -> list[str]:
        """Entries that have changed since they were captured. Checked once, by the first caller."""
        with self._checking:
            if self.guard is not None:
                self._changed, self.guard = self.guard.changed(), None
            return self._changed

    def release(self) -> None:
        """Release tensor references; the copy is complete."""
        self.snapshot.release()
        self.transfer.release()


class Overlap:
    """The background copies of one Checkpointer, one at a time. Public methods belong to the training thread."""

    def __init__(self) -> None:
        self.on = True
        """False once state was changed outside optimizers while it was copied."""
        self._pid = os.getpid()
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="ckpt-copy")
        self._pending: PendingCopy | None = None
        self._client: SaveClient | None = None
        self._frozen = FrozenTracker()
        self._stepped = False
        """Whether an optimizer was about to step since the last save."""
        self._step_lock = threading.Lock()  # backward passes of several devices step from several threads
        self._remove_hook = weakref.finalize(self, register_optimizer_step_pre_hook(_hook(weakref.ref(self))).remove)

    def can_overlap(self, leaf: Leaf) -> bool:
        """Whether a leaf can be copied while training continues."""
        if leaf.change is Change.ANY_TIME or not (leaf.tensor.is_cpu or leaf.tensor.is_cuda):
            return False
        if leaf.change is Change.NEVER:
            return leaf.slice.bytes >= FROZEN_BYTES and leaf.slice in self._frozen
        if leaf.tensor.is_cuda:
            # A step replayed from a CUDA graph calls no hook, and no guard detects it. Until a hook was called, leaves
            # are copied in the order of the current stream, before anything that is replayed there.
            return self._stepped
        return leaf.slice.bytes >= _SMALL_BYTES

    def sameness(self, captured: Captured) -> object | None:
        """Equal for captures with the same leaves and the same answers of can_overlap; None if that is not known."""
        return captured.sameness and (captured.sameness, self._frozen.changes, self._stepped)

    def begin(self, client: SaveClient, pending: PendingCopy) -> None:
        """Copy in the background, then submit the job. The previous copy has been joined."""
        self._client, self._pending = client, pending
        stepped, self._stepped = self._stepped, False
        pending.future = self._copier.submit(self._copy, pending, stepped)

    def join(self) -> None:
        """Return when the last snapshot is submitted to the saver or has failed."""
        pending, self._pending = self._pending, None
        if pending is None or pending.future is None:
            return
        pending.future.result()
        if not pending.step_reached and pending.error is None and (changed := pending.changed_entries()):
            self.on = False
            self._abandon(pending, _torn_error(changed))

    def before_step(self) -> None:
        """An optimizer is about to step: order its work after the copy, or copy again what has changed."""
        self._stepped = True
        pending = self._pending
        if pending is None or pending.step_reached or os.getpid() != self._pid:  # a forked child has its own memory
            return
        with self._step_lock:
            started = time.perf_counter()
            pending.copied.wait()
            if not pending.step_reached and pending.error is None:
                if changed := pending.changed_entries():
                    self._copy_again(pending, changed)
                pending.transfer.make_streams_wait()
            if not pending.step_reached:
                pending.snapshot.updates.measure(held_s=time.perf_counter() - started)
            pending.step_reached = True

    def close(self) -> None:
        """Join, and remove the hook from optimizers."""
        self.join()
        self._remove_hook()
        self._copier.shutdown()

    def _copy(self, pending: PendingCopy, stepped: bool) -> None:
        started, snapshot = time.perf_counter(), pending.snapshot
        assert snapshot.slot is not None
        try:
            pending.transfer.copy()
            pending.copied.set()
            pending.transfer.finish()
            snapshot.updates.measure(stage_s=time.perf_counter() - started)
            self._frozen.observe(snapshot.slot.segment, pending.transfer.frozen, stepped)
            if not pending.changed_entries():
                self._submit(pending)
        except BaseException as error:
            self._fail(pending, error)
        finally:
            pending.copied.set()

    def _copy_again(self, pending: PendingCopy, changed: Sequence[str]) -> None:
        self.on = False
        logger.warning(
            "%s changed after save_async and before optim.step(). The snapshot is copied again (a streamed save fails "
            "instead). From now on save_async returns only after the copy, as with overlap=False",
            _names(changed),
        )
        pending.transfer.copy_again()
        pending.future = self._copier.submit(self._finish, pending)

    def _finish(self, pending: PendingCopy) -> None:
        try:
            pending.transfer.finish()
            self._submit(pending)
        except BaseException as error:
            self._fail(pending, error)

    def _submit(self, pending: PendingCopy) -> None:
        assert self._client is not None
        self._client.submit(pending.snapshot)
        pending.release()

    def _fail(self, pending: PendingCopy, error: BaseException) -> None:
        pending.error = error
        logger.error("the snapshot of step %d was not copied", pending.snapshot.attempt.step, exc_info=error)
        if not isinstance(error, CkptError):
            error = SaveFailed(f"the snapshot was not copied: {error!r}")
        self._abandon(pending, error)

    def _abandon(self, pending: PendingCopy, error: CkptError) -> None:
        assert self._client is not None
        self._client.abandon(pending.snapshot, error)


def _hook(reference: weakref.ref[Overlap]) -> Callable[..., None]:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_step(*_: object) -> None:
        overlap = reference()
        if overlap is not None:
            overlap.before_step()

    return cast(Callable[..., None], before_step)


def _torn_error(entries: Sequence[str]) -> SnapshotTorn:
    return SnapshotTorn(
        f"{_names(entries)} changed while the snapshot was copied, and no optimizer was about to step",
        "Pass overlap=False to the Checkpointer if anything but optim.step() changes parameters between save_async and "
        "the next step. This process now behaves as with overlap=False",
    )


def _names(entries: Sequence[str]) -> str:
    more = f" and {len(entries) - _NAMED} more" if len(entries) > _NAMED else ""
    return ", ".join(entries[:_NAMED]) + more
