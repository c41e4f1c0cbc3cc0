"""Overlap: training continues while its state is copied. The optimizer waits for the copy before it changes anything.

State that changes only in `optim.step()` (parameters and optimizer state) is copied by another thread, or by the GPU
itself, during the next forward and backward. A hook before the step of any optimizer waits for the copy of what it
changes: on a GPU the stream waits, not the CPU. A guard detects state that was changed in another way while
it was copied.

    unchanged  the job is submitted to the saver
    changed    the save fails with SnapshotTorn on this rank and with RankFailed on the others; overlap ends here

A changed state is not copied again: it would be another state than that of the call, and on each rank that of another
moment.

Gate: before its step, and before any method that its class adds to Optimizer, an optimizer of the save waits for the
leaves in storages that it changes, and no others: a discriminator steps while the generator is still copied. Any other
optimizer waits for everything, because wrappers hide optimizers. So does every optimizer for leaves whose own optimizer
has not come to the gate by itself: some steps call no hook.

_StorageHolds: holding a storage keeps its memory from being freed, but some calls replace the memory inside the storage
and free the old one: sharing with other processes (`share_memory_`, torch.multiprocessing) and `resize_`. While a copy
is pending, these calls wait for it if they concern a storage that it reads.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt.capture.leaves import Change
from ckpt.capture.optimizers import state_holder
from ckpt.capture.parts import inner_tensors
from ckpt.device import Patience, has_device, is_capturing, stuck
from ckpt.snapshot.client import SaveClient, Snapshot
from ckpt.snapshot.guard import (
    EVERYONE,
    FROZEN_BYTES,
    ChangeGuard,
    CopyProgress,
    DigestGuard,
    FrozenTracker,
    Guard,
    Part,
    Watch,
    torn_error,
)
from ckpt.snapshot.stage import Stager, Transfer, is_plain
from ckptstore.errors import CkptError, InvalidRequest, SaveFailed, SnapshotTorn
from ckptstore.format.shards import Slice
from ckptstore.threads import Latch

logger = logging.getLogger(__name__)

_REPLACING = ("_share_fd_cpu_", "_share_filename_cpu_", "resize_")
"""The methods of storages that replace memory; `share_memory_` calls one of the first two."""


class _StorageHolds:
    """All pending copies of this process. The methods of storages are wrapped while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holds: tuple[PendingCopy, ...] = ()
        self._wrapped: dict[str, tuple[Any, Any]] = {}
        """By name: the attribute of the class itself (None: it inherits one), and the wrapper."""
        self._pid = 0
        """The id of the process that copies."""

    def add(self, hold: PendingCopy) -> None:
        with self._lock:
            if not self._holds:
                self._pid = os.getpid()
                for name in _REPLACING:
                    wrapper = _waiting(getattr(torch.UntypedStorage, name), self.wait_for)
                    self._wrapped[name] = vars(torch.UntypedStorage).get(name), wrapper
                    setattr(torch.UntypedStorage, name, wrapper)
            self._holds = (*self._holds, hold)

    def remove(self, hold: PendingCopy) -> None:
        with self._lock:
            self._holds = tuple(held for held in self._holds if held is not hold)
            for name, (original, wrapper) in () if self._holds else self._wrapped.items():
                if vars(torch.UntypedStorage).get(name) is not wrapper:
                    continue  # other code has wrapped it meanwhile
                if original is None:
                    delattr(torch.UntypedStorage, name)
                else:
                    setattr(torch.UntypedStorage, name, original)

    def wait_for(self, storage: torch.UntypedStorage) -> None:
        if os.getpid() == self._pid:  # the copies of a forked child's parent do not read the child's memory
            for hold in self._holds:
                hold.wait_for(storage)


def _waiting(method: Callable[..., Any], wait_for: Callable[[Any], object]) -> Callable[..., Any]:
    """A method of a class of torch that first waits for copies which concern the object."""

    @functools.wraps(method)
    def wait_first(owner: Any, *args: Any, **kwargs: Any) -> Any:
        wait_for(owner)
        return method(owner, *args, **kwargs)

    vars(wait_first)["waits_for_copies"] = True
    return wait_first


_storage_holds = _StorageHolds()


_PLAIN = (torch.Tensor, nn.Parameter)
_captured: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""The optimizers whose step is in a CUDA graph: a replay changes state and calls no hook."""


class Gate:
    """The optimizers of one Checkpointer's saves, and what they change. Belongs to the training thread."""

    def __init__(self) -> None:
        self._came: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Those that were about to step since the last save."""
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Those that ever were."""
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._owners: dict[int, Part] | None = None
        """By address of a storage: the optimizers that change it. None: not computed yet."""
        self.hooked: Part = EVERYONE
        """The optimizers of the next save whose every step calls the hook."""

    def come(self, optimizer: Optimizer, capturing: bool) -> None:
        """An optimizer is about to step; or the step is captured into a graph."""
        self._came.add(optimizer)
        if capturing:
            _captured.add(optimizer)
        else:
            self._known.add(optimizer)

    def expect(self, optimizers: Iterable[Optimizer]) -> None:
        """These are the optimizers of the next save.

        A step that is replayed from a CUDA graph calls no hook, and no version counter moves. So an optimizer counts as
        hooked if it has called the hook, and was never captured. One with `capturable=True` is likely to be in a graph
        that was captured before: it must have called the hook since the last save.
        """
        self._numbers = weakref.WeakKeyDictionary({one: number for number, one in enumerate(optimizers)})
        self._owners = None
        self.hooked = frozenset(number for one, number in self._numbers.items() if self._is_hooked(one))

    def saved(self) -> bool:
        """A save begins. Whether an optimizer was about to step since the last one."""
        stepped = bool(self._came)
        self._came.clear()
        return stepped

    def part(self, tensor: torch.Tensor) -> Part:
        """The part that a leaf belongs to."""
        if self._owners is None:
            self._owners = _owners(self._numbers)
        owners = self._owners.get(tensor.untyped_storage().data_ptr(), EVERYONE)
        return owners if owners <= self.hooked else EVERYONE

    def waits(self, optimizer: Optimizer, progress: CopyProgress) -> list[Part]:
        """The parts that an optimizer waits for."""
        return progress.parts_of(self._numbers.get(optimizer))

    def _is_hooked(self, optimizer: Optimizer) -> bool:
        if optimizer in _captured or optimizer not in self._known:
            return False
        return optimizer in self._came or not any(group.get("capturable") for group in optimizer.param_groups)


def _owners(numbers: Mapping[Optimizer, int]) -> dict[int, Part]:
    owners: dict[int, Part] = {}
    for optimizer, number in numbers.items():
        held = [group["params"] for group in optimizer.param_groups]
        found = set(map(_storage, _tensors([held, list(state_holder(optimizer).state.values())])))
        alone = frozenset((number,))  # one object for all of its tensors
        for address in found:
            owners[address] = owners[address] | alone if address in owners else alone
    owners.pop(0, None)
    return owners


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors with memory of their own in nested containers."""
    if type(value) in _PLAIN:
        yield value
    elif isinstance(value, torch.Tensor):
        if inner := inner_tensors("", value):
            yield from _tensors(inner)
        else:
            yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _storage(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage; 0 if it has none."""
    local = tensor._local_tensor if type(tensor) not in _PLAIN and isinstance(tensor, DTensor) else tensor
    try:
        return local.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a sparse or fake tensor, which is in no save
        return 0


_SMALL_BYTES = 16 << 10
"""Smaller tensors in host memory are copied at once: handing them to another thread takes as long."""
_WATCHED_SAVES = 2
_YIELD_S = 200e-6
"""The thread that copies lets training go on first: holding the interpreter, it could delay it by 5 ms."""
_DEVICE_S = 60.0
"""How long `close` waits for a device, which is busy for seconds at most if it makes progress."""
_BLOCKED_S = 5.0
"""How much longer it waits for the thread that copies, which a launch may block."""
_STUCK: list[PendingCopy] = []
"""Copies that devices had not finished when their Checkpointer was closed. They may still write to the slots."""


@dataclass
class PendingCopy:
    """A snapshot that is being copied in the background."""

    client: SaveClient
    """Gets the job."""
    transfer: Transfer
    guard: Guard | None
    """None once everything has been checked."""
    snapshot: Snapshot
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.begun = Latch()
        """Set once the gate waits for the copy."""
        self.copied = Latch()
        """Set once host memory is copied and the GPUs' copies are enqueued, or the copy has failed."""
        self.patience = Patience()
        self.passed = set[Part]()
        """The parts of optimizers that are about to step, or have stepped, since the save."""
        self.held_s = 0.0
        """How long optimizers were held."""
        self.ended = Latch()
        """Set once the snapshot is submitted or has failed, and no memory is read any more."""
        self._checked = set[Part]()
        self._changed = list[str]()
        self._checking = threading.Lock()
        self._addresses: frozenset[int] | None = None
        """The addresses of the storages that are read."""

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

    def wait_for(self, storage: torch.UntypedStorage) -> None:
        """Return when the memory of a storage is no longer read, neither to copy it nor to check it. For any thread."""
        if storage.device.type not in ("cpu", "cuda"):
            return  # a storage without memory, of a meta or fake tensor
        if self._addresses is None:  # computed by the first caller only: most copies see none
            # Without 0, the address of each storage that is empty or was freed.
            self._addresses = frozenset(held.data_ptr() for held in self.transfer.held()) - {0}
        if storage.data_ptr() not in self._addresses:
            return
        self.copied.wait()
        if self.transfer.finish(self.patience.expired) and self.error is None:
            self.changed_entries()


class Overlap:
    """The background copies of one Checkpointer, one at a time. Public methods belong to the training thread."""

    def __init__(self, verify: bool, stepping: Callable[[Optimizer], None]) -> None:
        """verify: digests of all bytes decide whether a leaf has changed, also in a large state, not counters and
        samples. stepping: called before an optimizer steps."""
        self._verify = verify
        self._stepping = stepping
        self.on = True
        """False once state was changed outside optimizers while it was copied."""
        self._pid = os.getpid()
        self._pending: PendingCopy | None = None
        self._frozen = FrozenTracker()
        self._gate = Gate()
        self._layout: object = None
        self._watched = 0
        """How many overlapped saves had this layout."""
        self._logged = False
        self._saved = False
        """Whether there was a save: training has needed all of its memory since."""
        self._step_lock = threading.Lock()  # backward passes of several devices step from several threads
        _overlaps.add(self)
        self.close = weakref.finalize(self, register_optimizer_step_pre_hook(_hook(weakref.ref(self))).remove)
        """Remove the hook from optimizers; nothing is copied."""

    def expect(self, optimizers: Iterable[Optimizer]) -> None:
        """These are the optimizers of the next save."""
        found = list(optimizers)
        for kind in set(map(type, found)) - _with_waiting_methods:
            _make_methods_wait(kind)
        self._gate.expect(found)

    def part(self, piece: Slice, tensor: torch.Tensor, change: Change) -> Part | None:
        """The part that a leaf belongs to if it can be copied while training continues; None if it cannot.

        A step that calls no hook, such as one in a CUDA graph, cannot wait. Memory that it changes on a GPU is copied
        in the order of the current stream, before anything that is replayed there.
        """
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

    def copy(self, client: SaveClient, snapshot: Snapshot, stager: Stager) -> bool:
        """Copy what cannot wait, and then the rest in the background. False if nothing is left to copy."""
        captured, layout = snapshot.captured, snapshot.layout
        # Equal for captures with the same leaves and the same parts.
        sameness = captured.sameness and (captured.sameness, self._frozen.changes, self._gate.hooked)
        new = layout is not self._layout or self._watched < _WATCHED_SAVES
        watch = Watch(digests=new, ahead=self._saved)
        transfer = stager.begin(captured.leaves, layout, self.part, sameness, watch)
        self._began(transfer, layout)
        if transfer.under_way:
            kind: type[Guard] = DigestGuard if self._verify or transfer.small else ChangeGuard
            guard = kind(transfer.later, transfer.samples, transfer.storages)
            transfer.check(captured.leaves)
            self.begin(PendingCopy(client, transfer, guard, snapshot))
            return True
        stager.complete(transfer, captured.leaves)
        return False

    def _began(self, transfer: Transfer, layout: object) -> None:
        """Logs once what happens to state on devices that cannot overlap."""
        if transfer.deferred_on_devices:
            self._layout, self._watched = layout, self._watched + 1 if layout is self._layout else 1
        ahead, in_order = transfer.ahead_bytes, transfer.in_order_bytes
        if self._saved and (ahead or in_order) and not self._logged:
            self._logged = True
            way = (
                "saves copy it in GPU memory first, and from there to host memory beside training"
                if not in_order
                else "the GPU copies it to host memory before it continues, because a copy does not fit into GPU memory"
            )
            logger.info(
                "%.1f MB of state on a GPU may change in steps that call no hook (CUDA graphs), or outside steps: %s",
                (ahead + in_order) / 1e6,
                way,
            )

    def begin(self, pending: PendingCopy) -> None:
        """Copy in the background, then submit the job. The previous copy has been joined."""
        stepped, self._saved = self._gate.saved(), True
        pending.client.calls.run(self._copy, pending, stepped, until=pending.begun)

    def join(self, timeout_s: float | None = None) -> None:
        """Return when the last snapshot is submitted to the saver or has failed. Raises TimeoutError."""
        pending = self._pending
        if pending is not None and not pending.ended.wait(timeout_s):
            raise TimeoutError(f"the state of step {pending.snapshot.attempt.step} is not copied after {timeout_s} s")
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
        if pending is None or pending.ended.is_set():
            return
        if capturing:
            raise InvalidRequest(
                "a step is captured into a CUDA graph while a snapshot is copied, which would end the capture",
                "Call wait() on the Checkpointer before the capture",
            )
        self._wait(optimizer, pending)

    def before_change(self, optimizer: Optimizer) -> None:
        """A method of an optimizer that may change parameters is about to run: as `before_step`, but it is no step."""
        pending = self._pending
        if pending is not None and not pending.ended.is_set() and os.getpid() == self._pid and not is_capturing():
            self._wait(optimizer, pending)

    def _wait(self, optimizer: Optimizer, pending: PendingCopy) -> None:
        """Wait until the leaves that an optimizer is about to change are copied."""
        parts, started = self._gate.waits(optimizer, pending.transfer.progress), time.perf_counter()
        if not pending.transfer.on_devices and pending.passed.issuperset(parts):
            return
        pending.patience.wanted.set()
        pending.transfer.progress.wait_for(parts)
        with self._step_lock:
            if pending.error is None:
                pending.changed_entries(parts)
                pending.transfer.make_streams_wait(parts)  # the next optimizer may step on another stream
            if not pending.passed.issuperset(parts):
                pending.passed.update(parts)
                pending.held_s += time.perf_counter() - started
                pending.snapshot.handle.measure(held_s=pending.held_s)

    def end_copy(self, timeout_s: float | None) -> None:
        """Join.

        timeout_s: how long to wait for a device, one minute by default. It may be stuck behind a collective of a dead
        rank; then the save fails. Raises SaveFailed if that thread is stuck too.
        """
        if (pending := self._pending) is not None:
            wait_s = _DEVICE_S if timeout_s is None else timeout_s
            pending.patience.give_up_at = time.monotonic() + wait_s
            if not pending.ended.wait(wait_s + _BLOCKED_S):
                _STUCK.append(pending)
                pending.snapshot.handle.fail(stuck())
                with pending.client.declining(pending.snapshot.attempt):
                    raise stuck()
        self.join()

    def _copy(self, pending: PendingCopy, stepped: bool) -> None:
        started, snapshot = time.perf_counter(), pending.snapshot
        assert snapshot.slot is not None
        assert pending.guard is not None
        pending.client.handed_over()
        self._pending = pending
        try:
            _storage_holds.add(pending)
            pending.begun.set()
            time.sleep(_YIELD_S)
            pending.transfer.copy(pending.guard, pending.patience)
            pending.copied.set()
            reads = snapshot.captured.reads
            if not pending.transfer.finish(pending.patience.expired) or not reads.finish(pending.patience.expired):
                raise stuck()
            snapshot.handle.measure(stage_s=time.perf_counter() - started)
            if changed := pending.changed_entries() or pending.transfer.torn():
                raise torn_error(
                    changed,
                    "between save_async and the end of the copy, outside the step of its optimizer",
                    "Change parameters before save_async or after the step of their own optimizer, or pass "
                    "overlap=False to the Checkpointer. This process now behaves as with overlap=False",
                )
            self._frozen.observe(snapshot.slot.segment, pending.transfer.frozen, stepped)
            pending.client.submit(snapshot)
            pending.transfer.release()
        except BaseException as error:
            self._fail(pending, error)
        finally:
            pending.transfer.progress.end()
            pending.copied.set()
            _storage_holds.remove(pending)
            pending.begun.set()
            pending.ended.set()

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
        pending.client.abandon(pending.snapshot, error, keep_slot=not _let_go(pending))


_overlaps: weakref.WeakSet[Overlap] = weakref.WeakSet()
_with_waiting_methods: set[type[Optimizer]] = set()


def _make_methods_wait(kind: type[Optimizer]) -> None:
    """The methods that a class adds to Optimizer wait for copies: they may change parameters, as `train` and `eval` of
    optimizers that keep averages do, and the two steps of SAM. torch wraps `step` for its hooks in the same way."""
    _with_waiting_methods.add(kind)
    for name in set(dir(kind)) - set(dir(Optimizer)):
        method = inspect.getattr_static(kind, name)
        if name[0] != "_" and inspect.isfunction(method) and not hasattr(method, "waits_for_copies"):
            setattr(kind, name, _waiting(method, _wait_for_copies))


def _wait_for_copies(optimizer: Optimizer) -> None:
    for overlap in list(_overlaps):
        overlap.before_change(optimizer)


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
