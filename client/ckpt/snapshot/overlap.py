"""Overlap: training continues while its state is copied. The optimizer waits for the copy before it changes anything.

State that changes only in `optim.step()` (parameters and optimizer state) is copied by another thread, or by the GPU
itself, during the next forward and backward. A hook before the step of any optimizer waits for the copy: on a GPU the
stream waits, not the CPU. A guard detects state that was changed in another way while it was copied.

    unchanged  the job is submitted to the saver
    changed    the save fails with SnapshotTorn on this rank and with RankFailed on the others; overlap ends here

A changed state is not copied again: it would be another state than that of the call, and on each rank that of another
moment.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt.capture.leaves import Captured, Change, Leaves, StateLeaf
from ckpt.device import Patience, has_device, is_capturing
from ckpt.snapshot.client import SaveClient
from ckpt.snapshot.guard import FROZEN_BYTES, ChangeGuard, FrozenTracker, Guard, Sample
from ckpt.snapshot.holds import StorageHold, hold_storages, release_storages
from ckpt.snapshot.request import Snapshot
from ckpt.snapshot.stage import is_plain
from ckpt.snapshot.verify import DigestGuard
from ckptstore.errors import CkptError, InvalidRequest, SaveFailed, SnapshotTorn
from ckptstore.format.shards import Placed

logger = logging.getLogger(__name__)

_SMALL_BYTES = 16 << 10
"""Smaller tensors in host memory are copied at once: handing them to another thread takes as long."""
_NAMED = 3
_WATCHED_SAVES = 2
_DEVICE_S = 60.0
"""How long `close` waits for a device, which is busy for seconds at most if it makes progress."""
_STUCK: list[PendingCopy] = []
"""Copies that devices had not finished when their Checkpointer was closed. They may still write to the slots."""


class BackgroundCopy(Protocol):
    """The copy of one snapshot. `copy` and `finish` run on the copier thread, the others on the training thread."""

    @property
    def storages(self) -> Sequence[torch.UntypedStorage]:
        """The storages that it reads."""

    @property
    def on_devices(self) -> bool:
        """Whether a device copies some of it."""

    @property
    def frozen(self) -> Sequence[Placed]:
        """The copies in the slot of large leaves that are expected not to change."""

    def copy(self, guard: Guard, patience: Patience) -> None:
        """Copy host memory, and start the copies of GPUs. guard: checks the leaves in host memory."""

    def make_streams_wait(self) -> None:
        """Order later work of the current GPU streams after the copy. Does not wait. Call it after `copy`."""

    def finish(self, expired: Callable[[], bool] | None = None) -> bool:
        """Wait until the slot holds everything. False if a device has not finished when time has expired."""

    def torn(self) -> list[str]:
        """Entries that had changed when devices copied them. Call it after `finish`."""

    def release(self) -> None:
        """Release the tensors. Call it after `finish`."""


@dataclass(slots=True)
class PendingCopy:
    """A snapshot that is being copied in the background."""

    transfer: BackgroundCopy
    guard: Guard | None
    """None once it has been checked."""
    snapshot: Snapshot
    copied: threading.Event = field(default_factory=threading.Event)
    """Set once host memory is copied and the GPUs' copies are enqueued, or the copy has failed."""
    patience: Patience = field(default_factory=Patience)
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

    def wait_until_read(self) -> None:
        """Return when the state's memory is no longer read, neither to copy it nor to check it. For any thread."""
        self.copied.wait()
        if self.transfer.finish(self.patience.expired) and self.error is None:
            self.changed_entries()

    @property
    def ended(self) -> bool:
        """Whether the snapshot is submitted or has failed, and no memory is read any more."""
        return self.future is not None and self.future.done()

    def release(self) -> None:
        """Release tensor references; the copy is complete."""
        self.snapshot.release()
        self.transfer.release()


class Overlap:
    """The background copies of one Checkpointer, one at a time. Public methods belong to the training thread."""

    def __init__(self, verify: bool = False, stepping: Callable[[Optimizer], None] = lambda _: None) -> None:
        """verify: decide by digests of all bytes whether a leaf has changed, not by counters and samples. stepping:
        called before an optimizer steps."""
        self._verify = verify
        self._stepping = stepping
        self.on = True
        """False once state was changed outside optimizers while it was copied."""
        self._pid = os.getpid()
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="ckpt-copy")
        self._pending: PendingCopy | None = None
        self._client: SaveClient | None = None
        self._frozen = FrozenTracker()
        self._came: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """The optimizers that were about to step since the last save."""
        self._captured: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """The optimizers whose step is in a CUDA graph: a replay changes state and calls no hook."""
        self._logged = False
        """Whether it was logged that some state does not overlap."""
        self._hooked = False
        """Whether every step of the optimizers of this save calls the hook."""
        self._layout: object = None
        self._watched = 0
        """How many overlapped saves had this layout."""
        self._step_lock = threading.Lock()  # backward passes of several devices step from several threads
        self._remove_hook = weakref.finalize(self, register_optimizer_step_pre_hook(_hook(weakref.ref(self))).remove)

    def expect(self, optimizers: Iterable[Optimizer]) -> None:
        """These are the optimizers of the next save.

        A step replayed from a CUDA graph calls no hook, and no guard detects it. So the leaves of GPUs overlap only if
        each of the optimizers has called the hook since the last save, and none was captured. Otherwise they are copied
        in the order of the current stream, before anything that is replayed there. Leaves of `capturable` optimizers
        are always copied so.
        """
        every = list(optimizers)
        known = [one for one in every if not all(group.get("capturable") for group in one.param_groups)]
        if len(known) < len(every) and not self._logged:
            self._logged = True
            logger.info("state of optimizers with capturable=True, which compiled steps set, is copied without overlap")
        self._hooked = all(one in self._came and one not in self._captured for one in known)

    def can_overlap(self, leaf: StateLeaf) -> bool:
        """Whether a leaf can be copied while training continues."""
        on_device = has_device(leaf.tensor)
        if leaf.change is Change.ANY_TIME or not (leaf.tensor.is_cpu or on_device):
            return False
        if self._verify and not is_plain(leaf.tensor):
            return False  # copied at the call; by a GPU in the order of the current stream, so that no check is needed
        if leaf.change is Change.NEVER:
            return leaf.slice.bytes >= FROZEN_BYTES and leaf.slice in self._frozen
        if on_device:
            return self._hooked
        return leaf.slice.bytes >= _SMALL_BYTES

    def sameness(self, captured: Captured) -> object | None:
        """Equal for captures with the same leaves and the same answers of can_overlap; None if that is not known."""
        return captured.sameness and (captured.sameness, self._frozen.changes, self._hooked)

    def guard(self, leaves: Leaves, samples: Sequence[Sample], storages: Sequence[torch.UntypedStorage]) -> Guard:
        """The guard of leaves that are copied from now on; see `Guard`."""
        kind = DigestGuard if self._verify else ChangeGuard
        return kind(leaves, samples, storages)

    def watches(self, layout: object) -> bool:
        """Whether to detect changes on devices from the call on: in the first overlapped saves of a layout."""
        return layout is not self._layout or self._watched < _WATCHED_SAVES

    def watched(self, layout: object) -> None:
        """A save with this layout overlaps."""
        self._layout, self._watched = layout, self._watched + 1 if layout is self._layout else 1

    def begin(self, client: SaveClient, pending: PendingCopy) -> None:
        """Copy in the background, then submit the job. The previous copy has been joined."""
        self._client, self._pending = client, pending
        stepped = bool(self._came)
        self._came.clear()
        hold = StorageHold(pending.transfer.storages, pending.wait_until_read)
        hold_storages(hold)
        try:
            pending.future = self._copier.submit(self._copy, pending, stepped, hold)
        except BaseException:
            release_storages(hold)
            raise

    def join(self, timeout_s: float | None = None) -> None:
        """Return when the last snapshot is submitted to the saver or has failed. Raises TimeoutError."""
        pending = self._pending
        if pending is not None and pending.future is not None:
            try:
                pending.future.result(timeout_s)
            except TimeoutError:
                step = pending.snapshot.attempt.step
                raise TimeoutError(f"the state of step {step} is not copied after {timeout_s} s") from None
        self._pending = None

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step: order its work after the copy, and check for changes before it makes some.

        Raises InvalidRequest if the step is captured into a graph while a snapshot is copied.
        """
        if os.getpid() != self._pid:  # a forked child has its own memory
            return
        self._stepping(optimizer)
        self._came.add(optimizer)
        pending = self._pending
        if is_capturing():
            self._captured.add(optimizer)
            if pending is not None and not pending.ended:
                raise InvalidRequest(
                    "a step is captured into a CUDA graph while a snapshot is copied, which would end the capture",
                    "Call wait() on the Checkpointer before the capture",
                )
            return
        if pending is None or pending.ended or (pending.step_reached and not pending.transfer.on_devices):
            return
        started = time.perf_counter()
        pending.patience.wanted.set()
        pending.copied.wait()
        with self._step_lock:
            if pending.error is None:
                if not pending.step_reached:
                    pending.changed_entries()
                pending.transfer.make_streams_wait()  # the next optimizer may step on another stream
            if not pending.step_reached:
                pending.snapshot.updates.measure(held_s=time.perf_counter() - started)
            pending.step_reached = True

    def close(self, timeout_s: float | None = None) -> None:
        """Join, and remove the hook from optimizers.

        timeout_s: how long to wait for a device, one minute by default. It may be stuck behind a collective of a dead
        rank; then the save fails.
        """
        if self._pending is not None:
            self._pending.patience.give_up_at = time.monotonic() + (_DEVICE_S if timeout_s is None else timeout_s)
        self.join()
        self._remove_hook()
        self._copier.shutdown()

    def _copy(self, pending: PendingCopy, stepped: bool, hold: StorageHold) -> None:
        started, snapshot = time.perf_counter(), pending.snapshot
        assert snapshot.slot is not None
        assert pending.guard is not None
        try:
            pending.transfer.copy(pending.guard, pending.patience)
            pending.copied.set()
            reads = snapshot.request.captured.reads
            if not pending.transfer.finish(pending.patience.expired) or not reads.finish(pending.patience.expired):
                raise _stuck_error()
            snapshot.updates.measure(stage_s=time.perf_counter() - started)
            if changed := pending.changed_entries() or pending.transfer.torn():
                raise _torn_error(changed)
            self._frozen.observe(snapshot.slot.segment, pending.transfer.frozen, stepped)
            self._submit(pending)
        except BaseException as error:
            self._fail(pending, error)
        finally:
            pending.copied.set()
            release_storages(hold)

    def _submit(self, pending: PendingCopy) -> None:
        assert self._client is not None
        self._client.submit(pending.snapshot)
        pending.release()

    def _fail(self, pending: PendingCopy, error: BaseException) -> None:
        pending.error = error
        step = pending.snapshot.attempt.step
        if isinstance(error, SnapshotTorn):
            self.on = False
            logger.warning("the save of step %d failed: %s", step, error)
        else:
            logger.error("the snapshot of step %d was not copied", step, exc_info=error)
        if not isinstance(error, CkptError):
            error = SaveFailed(f"the snapshot was not copied: {error!r}")
        assert self._client is not None
        self._client.abandon(pending.snapshot, error, keep_slot=not _let_go(pending))


def _hook(reference: weakref.ref[Overlap]) -> Callable[..., None]:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_step(optimizer: Optimizer, *_: object) -> None:
        overlap = reference()
        if overlap is not None:
            overlap.before_step(optimizer)

    return cast(Callable[..., None], before_step)


def _let_go(pending: PendingCopy) -> bool:
    """Wait until no device writes to the slot of a failed copy. False if one still does: its memory is kept then."""
    try:
        finished = pending.transfer.finish(pending.patience.expired)
    except Exception:  # the context of the device is broken, and executes nothing more
        return True
    if not finished:
        _STUCK.append(pending)
    return finished


def _stuck_error() -> SaveFailed:
    return SaveFailed(
        "a device did not finish the copy of the snapshot in time",
        "It is stuck behind earlier work, such as a collective whose other rank is lost. Look for the first rank that "
        "failed",
    )


def _torn_error(entries: Sequence[str]) -> SnapshotTorn:
    return SnapshotTorn(
        f"{_names(entries)} changed after save_async and before the copy was complete, outside optim.step()",
        "Pass overlap=False to the Checkpointer if anything but optim.step() changes parameters between save_async and "
        "the next step. This process now behaves as with overlap=False",
    )


def _names(entries: Sequence[str]) -> str:
    more = f" and {len(entries) - _NAMED} more" if len(entries) > _NAMED else ""
    return ", ".join(entries[:_NAMED]) + more
