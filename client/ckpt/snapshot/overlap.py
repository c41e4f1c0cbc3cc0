"""Overlap: training goes on while its state is copied, and the optimizer waits for the copy before it changes anything.

What only `optim.step()` changes, parameters and the optimizer's state, is copied by another thread or by the GPU itself
while the next forward and backward run. A hook that runs before the step of any optimizer holds it until the copy is
taken: on a GPU its stream waits, not the CPU. A guard looks for changes that came another way.

    whole           the job goes to the saver
    torn, at step   the copy is taken once more, for the state before the step is still that of the save; overlap ends
    torn, elsewhere the save fails with SnapshotTorn; overlap ends
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
from typing import cast

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt.capture.leaves import Captured, Change, Leaf
from ckpt.saver.messages import SaveJob
from ckpt.snapshot.arena import ArenaSlot
from ckpt.snapshot.client import PendingJob, SaveClient
from ckpt.snapshot.guard import FROZEN_BYTES, ChangeGuard, FrozenTracker
from ckpt.snapshot.handle import SaveHandle
from ckpt.snapshot.stage import SnapshotLayout
from ckpt.snapshot.transfer import Transfer
from ckptstore.errors import CkptError, SaveFailed, SnapshotTorn

logger = logging.getLogger(__name__)

_SMALL_BYTES = 16 << 10
"""Host memory up to this size is copied in the time that it takes to hand it over."""
_NAMED = 3


def copy_snapshot(
    client: SaveClient,
    slot: ArenaSlot,
    captured: Captured,
    layout: SnapshotLayout,
    pending_job: PendingJob,
    handle: SaveHandle,
    overlap: Overlap | None,
) -> None:
    """Copy the leaves into the slot, and submit the job when all are copied: now, or in the background."""
    began, leaves = time.perf_counter(), captured.leaves
    if overlap is not None and overlap.on:
        transfer = slot.stager.begin(leaves, layout, overlap.can_overlap, overlap.sameness(captured))
        if transfer.under_way:
            guard = ChangeGuard(transfer.later, transfer.samples)
            overlap.begin(client, PendingCopy(transfer, guard, pending_job, handle, slot))
            return
        transfer.finish()
    else:
        slot.stager.stage(leaves, layout, captured.sameness)
    handle._measure(stage_s=time.perf_counter() - began)
    client.submit(pending_job.complete(), handle)


@dataclass(slots=True)
class PendingCopy:
    """A snapshot that is being copied, and what becomes of it then."""

    transfer: Transfer
    guard: ChangeGuard | None
    """Until it has told."""
    pending_job: PendingJob
    handle: SaveHandle
    slot: ArenaSlot
    copied: threading.Event = field(default_factory=threading.Event)
    """GPUs have been told; host memory is copied; or neither will be."""
    step_reached: bool = False
    """An optimizer has come to the gate."""
    error: BaseException | None = None
    future: Future[None] | None = None
    _changed: list[str] = field(default_factory=list)
    _deciding: threading.Lock = field(default_factory=threading.Lock)

    def changed_entries(self) -> list[str]:
        """Entries that have changed since they were captured; decided once, by whoever comes first."""
        with self._deciding:
            if self.guard is not None:
                self._changed, self.guard = self.guard.changed(), None
            return self._changed

    def release(self, job: SaveJob) -> None:
        """Keep no tensor any more: all is copied, and this came of it."""
        self.pending_job = PendingJob.of(job)
        self.transfer.release()


class Overlap:
    """The copies of one Checkpointer, one at a time. All public methods belong to the training thread."""

    def __init__(self) -> None:
        self.on = True
        """Whether the loop has been found to change its state in optimizers only."""
        self._pid = os.getpid()
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="ckpt-copy")
        self._pending: PendingCopy | None = None
        self._client: SaveClient | None = None
        self._frozen = FrozenTracker()
        self._stepped = False
        """Whether an optimizer has come to the gate since the last save."""
        self._gate = threading.Lock()  # backward passes of several devices step from several threads
        self._remove_hook = weakref.finalize(self, register_optimizer_step_pre_hook(_hook(weakref.ref(self))).remove)

    def can_overlap(self, leaf: Leaf) -> bool:
        """Whether a leaf can be copied while training goes on."""
        if leaf.change is Change.ANY_TIME or not (leaf.tensor.is_cpu or leaf.tensor.is_cuda):
            return False
        if leaf.change is Change.NEVER:
            return leaf.slice.bytes >= FROZEN_BYTES and leaf.slice in self._frozen
        if leaf.tensor.is_cuda:
            # A step that is replayed from a CUDA graph comes to no gate, and no guard sees it. What cannot wait for
            # the gate is copied in the order of the current stream, before whatever is replayed there.
            return self._stepped
        return leaf.slice.bytes >= _SMALL_BYTES

    def sameness(self, captured: Captured) -> object | None:
        """Equal for captures whose leaves are the same and may wait alike; None where that is not known."""
        return captured.sameness and (captured.sameness, self._frozen.changes, self._stepped)

    def begin(self, client: SaveClient, pending: PendingCopy) -> None:
        """Copy in the background, then submit the job. The flight before has been joined."""
        self._client, self._pending = client, pending
        stepped, self._stepped = self._stepped, False
        pending.future = self._copier.submit(self._copy, pending, stepped)

    def join(self) -> None:
        """Return when the last snapshot is in the saver's hands, or has failed."""
        pending, self._pending = self._pending, None
        if pending is None or pending.future is None:
            return
        pending.future.result()
        if not pending.step_reached and pending.error is None and (changed_entries := pending.changed_entries()):
            self.on = False
            self._abandon(pending, _torn_error(changed_entries))

    def before_step(self) -> None:
        """The gate: an optimizer is about to step. What it does from now on comes after the copy."""
        self._stepped = True
        pending = self._pending
        if pending is None or pending.step_reached or os.getpid() != self._pid:  # a forked child has its own memory
            return
        with self._gate:
            reached_at = time.perf_counter()
            pending.copied.wait()
            if not pending.step_reached and pending.error is None:
                if changed_entries := pending.changed_entries():
                    self._copy_again(pending, changed_entries)
                pending.transfer.make_streams_wait()
            if not pending.step_reached:
                pending.handle._measure(held_s=time.perf_counter() - reached_at)
            pending.step_reached = True

    def close(self) -> None:
        """Join, and let go of optimizers."""
        self.join()
        self._remove_hook()
        self._copier.shutdown()

    def _copy(self, pending: PendingCopy, stepped: bool) -> None:
        began = time.perf_counter()
        try:
            pending.transfer.copy()
            pending.copied.set()
            pending.transfer.finish()
            pending.handle._measure(stage_s=time.perf_counter() - began)
            self._frozen.learn(pending.slot.segment, pending.transfer.frozen, stepped)
            if not pending.changed_entries():
                self._deliver(pending)
        except BaseException as error:
            self._fail(pending, error)
        finally:
            pending.copied.set()

    def _copy_again(self, pending: PendingCopy, changed_entries: Sequence[str]) -> None:
        self.on = False
        logger.warning(
            "%s changed after save_async and before optim.step(): the snapshot is taken again, unless it is a stream, "
            "and from now on save_async returns when the copy is taken, as with overlap=False",
            _names(changed_entries),
        )
        pending.transfer.copy_again()
        pending.future = self._copier.submit(self._finish, pending)

    def _finish(self, pending: PendingCopy) -> None:
        try:
            pending.transfer.finish()
            self._deliver(pending)
        except BaseException as error:
            self._fail(pending, error)

    def _deliver(self, pending: PendingCopy) -> None:
        assert self._client is not None
        job = pending.pending_job.complete()
        self._client.submit(job, pending.handle)
        pending.release(job)

    def _fail(self, pending: PendingCopy, error: BaseException) -> None:
        pending.error = error
        logger.error("the snapshot of step %d was not copied", pending.handle.step, exc_info=error)
        if not isinstance(error, CkptError):
            error = SaveFailed(f"the snapshot was not copied: {error!r}")
        self._abandon(pending, error)

    def _abandon(self, pending: PendingCopy, error: CkptError) -> None:
        assert self._client is not None
        self._client.abandon(pending.pending_job, pending.handle, pending.slot, error)


def _hook(reference: weakref.ref[Overlap]) -> Callable[..., None]:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_step(*_: object) -> None:
        overlap = reference()
        if overlap is not None:
            overlap.before_step()

    return cast(Callable[..., None], before_step)


def _torn_error(entries: Sequence[str]) -> SnapshotTorn:
    return SnapshotTorn(
        f"{_names(entries)} changed while the snapshot was taken, and no optimizer was about to step",
        "Pass overlap=False to the Checkpointer if anything but optim.step() changes parameters between save_async and "
        "the next step; this process now goes on as if you had",
    )


def _names(entries: Sequence[str]) -> str:
    more = f" and {len(entries) - _NAMED} more" if len(entries) > _NAMED else ""
    return ", ".join(entries[:_NAMED]) + more
