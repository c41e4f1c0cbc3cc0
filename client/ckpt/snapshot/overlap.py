"""Overlap: training continues while its state is copied. The optimizer waits for the copy before it changes anything.

State that changes only in `optim.step()` (parameters and optimizer state) is copied by another thread, or by the GPU
itself, during the next forward and backward. A hook before the step of any optimizer waits for the copy of what it
changes (gate.py): on a GPU the stream waits, not the CPU. A guard detects state that was changed in another way while
it was copied.

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
from typing import cast

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt.capture.leaves import Captured, Change, Leaves
from ckpt.device import Patience, has_device, is_capturing
from ckpt.snapshot.client import SaveClient
from ckpt.snapshot.device_guard import Watch
from ckpt.snapshot.gate import Gate
from ckpt.snapshot.guard import FROZEN_BYTES, ChangeGuard, FrozenTracker, Guard, Sample
from ckpt.snapshot.holds import StorageHold, hold_storages, release_storages
from ckpt.snapshot.progress import EVERYONE, Part
from ckpt.snapshot.request import Snapshot
from ckpt.snapshot.stage import is_plain
from ckpt.snapshot.transfer import Transfer
from ckpt.snapshot.verify import DigestGuard
from ckptstore.errors import CkptError, InvalidRequest, SaveFailed, SnapshotTorn
from ckptstore.format.shards import Slice

logger = logging.getLogger(__name__)

_SMALL_BYTES = 16 << 10
"""Smaller tensors in host memory are copied at once: handing them to another thread takes as long."""
_NAMED = 3
_WATCHED_SAVES = 2
_DEVICE_S = 60.0
"""How long `close` waits for a device, which is busy for seconds at most if it makes progress."""
_STUCK: list[PendingCopy] = []
"""Copies that devices had not finished when their Checkpointer was closed. They may still write to the slots."""


@dataclass(slots=True)
class PendingCopy:
    """A snapshot that is being copied in the background."""

    transfer: Transfer
    guard: Guard | None
    """None once everything has been checked."""
    snapshot: Snapshot
    copied: threading.Event = field(default_factory=threading.Event)
    """Set once host memory is copied and the GPUs' copies are enqueued, or the copy has failed."""
    patience: Patience = field(default_factory=Patience)
    passed: set[Part] = field(default_factory=set)
    """The parts of optimizers that are about to step, or have stepped, since the save."""
    held_s: float = 0.0
    """How long optimizers were held."""
    error: BaseException | None = None
    future: Future[None] | None = None
    _checked: set[Part] = field(default_factory=set)
    _changed: list[str] = field(default_factory=list)
    _checking: threading.Lock = field(default_factory=threading.Lock)

    def changed_entries(self, parts: Iterable[Part] | None = None) -> list[str]:
        """Entries that have changed since they were captured, of these parts and those that were asked for before.

        Each part is checked once, by the first caller: then its optimizers may change it. parts: None means all.
        """
        with self._checking:
            if self.guard is not None:
                new = set(self.transfer.parts if parts is None else parts) - self._checked
                self._changed += self.guard.changed([i for part in new for i in self.transfer.parts[part]])
                self._checked |= new
                if parts is None:
                    self.guard = None
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
        self._gate = Gate()
        self._layout: object = None
        self._watched = 0
        """How many overlapped saves had this layout."""
        self._logged = False
        self._saved = False
        """Whether there was a save: training has needed all of its memory since."""
        self._step_lock = threading.Lock()  # backward passes of several devices step from several threads
        self._remove_hook = weakref.finalize(self, register_optimizer_step_pre_hook(_hook(weakref.ref(self))).remove)

    def expect(self, optimizers: Iterable[Optimizer]) -> None:
        """These are the optimizers of the next save."""
        self._gate.expect(optimizers)

    def parts(self, leaves: Leaves) -> list[Part | None]:
        """Which leaves can be copied while training continues: the parts that they belong to; None if they cannot.

        A step that calls no hook, such as one in a CUDA graph, cannot wait. What it changes on a GPU is copied in the
        order of the current stream, before anything that is replayed there.
        """
        return list(map(self._part, leaves.slices, leaves.tensors, leaves.changes))

    def _part(self, piece: Slice, tensor: torch.Tensor, change: Change) -> Part | None:
        on_device = has_device(tensor)
        if change is Change.ANY_TIME or not (on_device or tensor.is_cpu):
            return None
        if self._verify and not is_plain(tensor):
            return None  # copied at the call; by a GPU in the order of the current stream, so that no check is needed
        part = self._gate.part(tensor)
        if change is Change.NEVER:
            return part if piece.bytes >= FROZEN_BYTES and piece in self._frozen else None
        if on_device:
            return part if part != EVERYONE else None
        return part if piece.bytes >= _SMALL_BYTES else None

    def sameness(self, captured: Captured) -> object | None:
        """Equal for captures with the same leaves and the same `parts`; None if that is not known."""
        return captured.sameness and (captured.sameness, self._frozen.changes, self._gate.hooked)

    def guard(self, leaves: Leaves, samples: Sequence[Sample], storages: Sequence[torch.UntypedStorage]) -> Guard:
        """The guard of leaves that are copied from now on; see `Guard`."""
        kind = DigestGuard if self._verify else ChangeGuard
        return kind(leaves, samples, storages)

    def watch(self, layout: object) -> Watch:
        """How to watch leaves on devices: closely in the first overlapped saves of a layout."""
        new = layout is not self._layout or self._watched < _WATCHED_SAVES
        return Watch(digests=new, ahead=self._saved)

    def began(self, transfer: Transfer, layout: object) -> None:
        """A transfer with this layout has begun. Logs once what happens to state on devices that cannot overlap."""
        if transfer.deferred_on_devices:
            self._layout, self._watched = layout, self._watched + 1 if layout is self._layout else 1
        ahead, in_order = transfer.ahead_bytes, transfer.in_order_bytes
        if self._saved and (ahead or in_order) and not self._logged:
            self._logged = True
            way = (
                "saves copy it in GPU memory first, and from there to host memory beside training"
                if not in_order
                else "the GPU copies it to host memory before it continues, because GPU memory has no room for a copy"
            )
            logger.info(
                "%.1f MB of state on a GPU may change in steps that call no hook (CUDA graphs), or outside steps: %s",
                (ahead + in_order) / 1e6,
                way,
            )

    def begin(self, client: SaveClient, pending: PendingCopy) -> None:
        """Copy in the background, then submit the job. The previous copy has been joined."""
        self._client, self._pending = client, pending
        stepped, self._saved = self._gate.saved(), True
        hold = StorageHold(pending.transfer.held, pending.wait_until_read)
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
        pending, capturing = self._pending, is_capturing()
        self._gate.come(optimizer, capturing)
        if pending is None or pending.ended:
            return
        if capturing:
            raise InvalidRequest(
                "a step is captured into a CUDA graph while a snapshot is copied, which would end the capture",
                "Call wait() on the Checkpointer before the capture",
            )
        parts = self._gate.waits(optimizer, pending.transfer.parts)
        if pending.transfer.on_devices or not pending.passed.issuperset(parts):
            self._pass(pending, parts)

    def _pass(self, pending: PendingCopy, parts: Sequence[Part]) -> None:
        """Wait for the copy of these parts, which are about to change."""
        started = time.perf_counter()
        pending.patience.wanted.set()
        pending.transfer.progress.wait_for(parts)
        with self._step_lock:
            if pending.error is None:
                pending.changed_entries(parts)
                pending.transfer.make_streams_wait(parts)  # the next optimizer may step on another stream
            if not pending.passed.issuperset(parts):
                pending.passed.update(parts)
                pending.held_s += time.perf_counter() - started
                pending.snapshot.updates.measure(held_s=pending.held_s)

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
            pending.transfer.progress.end()
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
        f"{_names(entries)} changed between save_async and the end of the copy, outside the step of its optimizer",
        "Change parameters before save_async or after the step of their own optimizer, or pass overlap=False to the "
        "Checkpointer. This process now behaves as with overlap=False",
    )


def _names(entries: Sequence[str]) -> str:
    more = f" and {len(entries) - _NAMED} more" if len(entries) > _NAMED else ""
    return ", ".join(entries[:_NAMED]) + more
