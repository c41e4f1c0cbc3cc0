"""Stage: copy the captured leaves into a slot of the arena.

State that may change at any time is copied on the training thread, which waits for memory copies only. State that
changes only in `optim.step()` may be copied later by another thread (overlap.py): the Stager begins a Transfer, which
copies host memory without holding the GIL. A GPU copies on a side stream, which waits for the work that was enqueued on
the current stream before the save.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from ckpt.capture.leaves import Change, Leaves
from ckpt.device import DEVICES, Patience, has_device, poll
from ckpt.host.segment import Segment
from ckpt.lazily import torch
from ckpt.snapshot.device_copies import DeviceCopies, pin_segment
from ckpt.snapshot.guard import (
    EVERYONE,
    FROZEN_BYTES,
    LET_NOTHING_WRITE,
    NOTHING,
    WHOLE_BYTES,
    CopyProgress,
    Guard,
    Move,
    Moves,
    Part,
    Sample,
    SamplePlaces,
    Watch,
    as_moves,
    differ_by_element,
    differing,
    is_in_order,
    move_all,
    sample,
    sample_places,
    torn_error,
    unread,
)
from ckptstore.format.shards import Placed, Slice, place_slices, raw_bytes

_MOVED_BYTES = 16 << 20
"""Before each copy of this size the address of the storage is checked."""


class Transfer:
    """The copy of one snapshot: `begun` and `copy` once, then `finish`.

    `begun` and `make_streams_wait` belong to the training thread.
    """

    def __init__(self, plan: _CopyPlan, leaves: Leaves, pinned: bool, watch: Watch) -> None:
        """pinned: whether the slot is page-locked."""
        self._plan = plan
        self.frozen = plan.frozen
        """The copies in the slot of large leaves that are expected not to change."""
        self.later = plan.waiting.among(leaves)
        """The leaves deferred to `copy`."""
        self.samples = plan.waiting.samples
        """Samples of each deferred leaf, for its guard."""
        deferred = self.later.tensors
        self.storages = list(map(torch.Tensor.untyped_storage, deferred)) if deferred else []  # else without torch
        """The storage of each deferred leaf. Holding them keeps the memory alive."""
        self.parts = plan.waiting.parts
        """Indexes of the deferred leaves by part."""
        self.progress = CopyProgress(self.parts)
        """Which parts are copied: host memory is, and the copies of devices are queued."""
        first = len(plan.later)
        self._spread = [tensor.detach() for tensor in self.later.tensors[first : first + len(plan.views)]]
        """The tensors copied to the plan's `views`. Detached, because a parameter may get other memory meanwhile."""
        self._devices = {
            device: DeviceCopies(
                DEVICES[device.type](device),
                pinned,
                watch,
                (found.views, [leaves.tensors[i] for i in found.indexes]),
                {part: (views, self.later.tensors[views.among]) for part, views in found.later.items()},
                found.samples,
            )
            for device, found in plan.devices.items()
        }

    @property
    def on_devices(self) -> bool:
        """Whether a device copies some of it."""
        return bool(self._devices)

    @property
    def deferred_on_devices(self) -> bool:
        """Whether a device copies leaves while training continues."""
        return any(found.later for found in self._plan.devices.values())

    @property
    def ahead_bytes(self) -> int:
        """Bytes of leaves on devices that cannot wait at the gate, and were copied on the device first."""
        return sum(copies.ahead_bytes for copies in self._devices.values())

    @property
    def in_order_bytes(self) -> int:
        """Bytes of such leaves that are copied to the host before the device continues to train."""
        return sum(copies.in_order_bytes for copies in self._devices.values())

    @property
    def under_way(self) -> bool:
        """Whether copies are deferred, or a GPU is copying."""
        return bool(self.later or self._devices)

    @property
    def small(self) -> bool:
        """Whether it takes little time to compare all bytes that are deferred; then DigestGuard can."""
        plan = self._plan
        return plan.whole and not (plan.views or plan.devices)

    def check(self, leaves: Leaves) -> None:
        """Raise SnapshotTorn if host memory that was copied at the call has changed since. leaves: all."""
        plan = self._plan
        found = [plan.moved[number] for number in differing(plan.now, plan.whole)]
        found += [i for view, i in plan.copied if differ_by_element(view, leaves.tensors[i], plan.whole)]
        if found:
            raise torn_error(
                [leaves.slices[i].entry for i in found],
                "while it was copied, in another thread or process",
                LET_NOTHING_WRITE,
            )

    def begun(self) -> None:
        """Order deferred copies of GPUs after the work enqueued so far."""
        for copies in self._devices.values():
            copies.begun()

    def copy(self, guard: Guard, patience: Patience) -> None:
        """Copy host memory, and start the copies of GPUs. guard: checks the leaves in host memory."""
        with torch.no_grad():
            left = self._copy_host_memory(guard)
            self._copy_devices(left, patience)

    def _copy_host_memory(self, guard: Guard) -> dict[Part, None]:
        """Returns the parts of which devices copy leaves."""
        move_all(self._plan.spread)
        left = {part: deque(indexes) for part, indexes in self._plan.on_host.items()}
        devices = {part for found in self._plan.devices.values() for part in found.later}
        while left:
            part = self.progress.next(left)
            self._copy_leaf(left[part].popleft(), guard)
            if not left[part]:
                del left[part]
                if part not in devices:
                    self.progress.copied(part)
        return dict.fromkeys(part for part in self.parts if part in devices)

    def _copy_leaf(self, index: int, guard: Guard) -> None:
        moves = self._plan.later
        if index >= len(moves):
            view = self._plan.views[index - len(moves)]
            if not guard.moved(index):
                view.copy_(self._spread[index - len(moves)])
                guard.copied(index, view.data_ptr(), view.nbytes)
            return
        to, source, size = moves[index]
        for at in range(0, size, _MOVED_BYTES):
            if guard.moved(index):
                break
            num_bytes = min(_MOVED_BYTES, size - at)
            ctypes.memmove(to + at, source + at, num_bytes)
            guard.copied(index, to + at, num_bytes)

    def _copy_devices(self, left: dict[Part, None], patience: Patience) -> None:
        for copies in self._devices.values():
            copies.start(patience)
        while left:
            part = self.progress.next(left)
            for copies in self._devices.values():
                copies.copy(part)
            self.progress.copied(part)
            del left[part]
        for copies in self._devices.values():
            copies.copy_gathered()

    def make_streams_wait(self, parts: Iterable[Part]) -> None:
        """Order later work of the current streams after the copy of these parts. Does not wait."""
        for copies in self._devices.values():
            copies.make_stream_wait(parts)

    def torn(self) -> list[str]:
        """Entries that had changed when devices copied them. Call it after `finish`."""
        return [
            self.later.slices[self._plan.devices[device].first + number].entry
            for device, copies in self._devices.items()
            for number in copies.torn()
        ]

    def finish(self, expired: Callable[[], bool] | None = None) -> bool:
        """Wait until the slot holds what devices copy. False if time has expired before. For any thread."""
        if not all(poll(copies.done, expired) for copies in self._devices.values()):
            return False
        for copies in self._devices.values():
            copies.place()
        return True

    def held(self) -> Iterable[torch.UntypedStorage]:
        """The storages that are read, by devices also those of leaves that are not deferred."""
        kept = chain.from_iterable(copies.tensors for copies in self._devices.values())
        return chain(self.storages, map(torch.Tensor.untyped_storage, kept))

    def release(self) -> None:
        """Release the tensors. Call it after `finish`."""
        self.later, self.storages, self._spread, self._devices = Leaves(), [], [], {}


Later: TypeAlias = "Callable[[Slice, torch.Tensor, Change], Part | None]"
"""The part of a leaf whose copy is deferred; None: it is not."""
_GATHERED_BYTES = 16 << 10
_ALL_GATHERED_BYTES = 4 << 20


class SnapshotLayout(NamedTuple):
    """Where the leaves of a snapshot lie in its slot: the raw stream of the shard."""

    slices: list[Slice]
    """The slices in the order of capture."""
    placed: list[Placed]
    order: list[int]
    """Index of the leaf at each place."""
    num_bytes: int

    @staticmethod
    def of(slices: Sequence[Slice]) -> SnapshotLayout:
        """The layout of leaves with these slices; equal in every save."""
        placed = place_slices(slices)
        index = {piece: i for i, piece in enumerate(slices)}
        order = [index[place.slice] for place in placed]
        return SnapshotLayout(list(slices), placed, order, raw_bytes(placed))


class _DeferredLeaves(Struct):
    """Leaves whose copy is deferred: the part that is equal in every save."""

    indexes: list[int] = []
    slices: list[Slice] = []
    changes: list[Change] = []
    samples: list[Sample] = []
    parts: dict[Part, list[int]] = {}
    """Places in these lists."""

    def add(
        self, indexes: Sequence[int], leaves: Leaves, parts: Iterable[Part], read: Callable[[torch.Tensor], Sample]
    ) -> None:
        """Append leaves. parts: of each. read: makes its sample."""
        for place, part in enumerate(parts, len(self.indexes)):
            self.parts.setdefault(part, []).append(place)
        self.indexes += indexes
        self.slices += [leaves.slices[i] for i in indexes]
        self.changes += [leaves.changes[i] for i in indexes]
        self.samples += [read(leaves.tensors[i]) for i in indexes]

    def among(self, leaves: Leaves) -> Leaves:
        """These leaves with their current tensors."""
        tensors, origins = ([column[i] for i in self.indexes] for column in (leaves.tensors, leaves.origins))
        return Leaves(self.slices, tensors, origins, self.changes)


class _SlotViews(Struct):
    """Tensors at some places of a slot, made when they are first used: by the thread that copies."""

    _segment: Segment
    at: list[int] = []
    indexes: list[int] = []
    """Indexes of the leaves."""
    among: slice = slice(0)
    """Where these leaves are among all that are deferred."""
    _made: list[torch.Tensor] = []

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """To copy these tensors to, which have the same types and shapes at each call."""
        if not self._made:
            self._made = [_view(self._segment, at, tensor) for at, tensor in zip(self.at, tensors, strict=True)]
        return self._made


class _DeviceLeaves(Struct):
    """Places in the slot of leaves of one device, and the indexes of the leaves.

    Every save goes through them column by column: an object for each leaf would cost more than the rest of the save.
    """

    views: list[torch.Tensor] = []
    """The places of those that are copied in the order of the current stream."""
    indexes: list[int] = []
    later: dict[Part, _SlotViews] = {}
    """Those that are deferred."""
    first: int = 0
    """The index of the first of these among all that are deferred."""
    samples: Sequence[SamplePlaces] = ()
    """Where the deferred leaves are sampled."""


class _CopyPlan(Struct):
    """How to copy leaves, valid while their sameness is equal: addresses, and indexes of leaves."""

    sameness: object | None
    now: Moves = NOTHING
    moved: list[int] = []
    """Indexes of the leaves of `now`."""
    gathered: npt.NDArray[np.uint8] | None = None
    """Small memory, which lies together now, and is copied to its places later: they are in no cache."""
    spread: Moves = NOTHING
    copied: list[tuple[torch.Tensor, int]] = []
    """Places and indexes of leaves in host memory whose bytes are not their elements in order."""
    later: list[Move] = []
    views: list[torch.Tensor] = []
    """The places of such leaves that are deferred."""
    waiting: _DeferredLeaves = field(default_factory=_DeferredLeaves)
    """The leaves of `later`, of `views`, and then those of devices that are deferred."""
    on_host: dict[Part, list[int]] = {}
    """Places in `waiting` of the leaves in host memory, by part."""
    devices: dict[torch.device, _DeviceLeaves] = {}
    frozen: list[Placed] = []
    """The places of large leaves that are expected not to change."""
    whole: bool = False
    """All bytes are compared after the copy, not samples."""

    def gather(self) -> None:
        """Gather what is small among `now`."""
        sizes = self.now[:, 2]
        small = sizes <= _GATHERED_BYTES
        ends = np.cumsum(sizes * small)
        small &= ends <= _ALL_GATHERED_BYTES
        self.gathered, self.spread = np.empty(sizes[small].sum(), np.uint8), self.now[small]
        self.spread[:, 1] = self.now[small, 0] = self.gathered.ctypes.data + (ends - sizes)[small]


class Stager:
    """Copies into one segment. The training thread begins a copy; another thread may finish its transfer.

    Keeps no tensor of the training loop between saves.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._address = ctypes.addressof(segment.map)
        self.gpu: torch.device | None = None
        """The GPU for which the segment was to be pinned; None: no GPU has copied into it yet."""
        self.pinned = False
        self._plan: _CopyPlan | None = None
        self._last: Transfer | None = None
        """The copy that began last. If its save was interrupted, a device may still write to the segment."""

    def pin(self, gpu: torch.device, ranks: int = 0) -> None:
        """Page-lock the segment, once for all GPUs. ranks: see pin_segment."""
        if self.gpu is None:
            self.pinned = pin_segment(self._segment, DEVICES[gpu.type](gpu), ranks)
            self.gpu = gpu

    def stage(self, leaves: Leaves, layout: SnapshotLayout, sameness: object | None) -> None:
        """Copy all leaves. On return the slot holds them, including those from a GPU. sameness: see `Captured`. Raises
        SnapshotTorn."""
        self.complete(self.begin(leaves, layout, None, sameness, Watch()), leaves)

    def warm_up(self, leaves: Leaves) -> None:
        """Copy the leaves of devices once, as a save beside training does. A driver loads each kernel at its first
        launch, and waits for the whole device then: training would wait for that in its first save."""
        if not (there := [i for i, tensor in enumerate(leaves.tensors) if has_device(tensor)]):
            return
        some = Leaves()
        for i in there:
            some.append(leaves.slices[i], leaves.tensors[i], leaves.origins[i], leaves.changes[i])
        layout, watch = SnapshotLayout.of(some.slices), Watch(digests=True)
        transfer = self.begin(some, layout, lambda *_: EVERYONE, None, watch)
        transfer._copy_devices({EVERYONE: None}, Patience())
        transfer.finish()
        transfer.release()

    def complete(self, transfer: Transfer, leaves: Leaves) -> None:
        """Wait for a copy of which nothing is deferred. Raises SnapshotTorn."""
        transfer.finish()
        transfer.check(leaves)
        transfer.release()

    def begin(
        self, leaves: Leaves, layout: SnapshotLayout, later: Later | None, sameness: object | None, watch: Watch
    ) -> Transfer:
        """Copy the leaves that cannot be deferred; those on a GPU are enqueued on the current stream instead.

        later: which leaves are deferred to `Transfer.copy`; None: no leaf is. sameness: if it is not None and equals
        the last one, the slices, the memory and the answers of `later` are the same as then.
        """
        if self._last is not None:
            self._last.finish()
        plan = self._plan
        if plan is None or sameness is None or plan.sameness != sameness:
            plan = self._plan = self._make_plan(leaves, layout, later, sameness)
        for device in plan.devices:
            self.pin(device)
        move_all(plan.now)
        if plan.copied:
            with torch.no_grad():
                for view, i in plan.copied:
                    view.copy_(leaves.tensors[i])
        transfer = self._last = Transfer(plan, leaves, self.pinned, watch)
        transfer.begun()
        return transfer

    def _make_plan(
        self, leaves: Leaves, layout: SnapshotLayout, later: Later | None, sameness: object | None
    ) -> _CopyPlan:
        plan = _CopyPlan(sameness, whole=layout.num_bytes <= WHOLE_BYTES)
        parts = list(map(later, leaves.slices, leaves.tensors, leaves.changes)) if later else [None] * len(leaves)
        now, moved, copied = list[Move](), list[int](), list[int]()
        for place, i in zip(layout.placed, layout.order, strict=True):
            tensor, part = leaves.tensors[i], parts[i]
            if leaves.changes[i] is Change.NEVER and place.slice.bytes >= FROZEN_BYTES:
                plan.frozen.append(place)
            if has_device(tensor):
                self._plan_device(plan, place, i, tensor, part)
            elif not is_plain(tensor):
                view = _view(self._segment, place.at, tensor)
                if part is None:
                    plan.copied.append((view, i))
                else:
                    plan.views.append(view)
                    copied.append(i)
            else:
                move = (self._address + place.at, tensor.data_ptr(), tensor.nbytes)
                if part is None:
                    now.append(move)
                    plan.moved.append(i)
                else:
                    plan.later.append(move)
                    moved.append(i)
        plan.now = as_moves(now)
        if plan.later:
            plan.gather()
        on_host = moved + copied
        plan.waiting.add(on_host, leaves, [part for i in on_host if (part := parts[i]) is not None], sample)
        plan.on_host = {part: list(indexes) for part, indexes in plan.waiting.parts.items()}
        for of_device in plan.devices.values():
            self._plan_deferred(plan, of_device, leaves)
        return plan

    def _plan_device(self, plan: _CopyPlan, place: Placed, index: int, tensor: torch.Tensor, part: Part | None) -> None:
        of_device = plan.devices.get(tensor.device) or plan.devices.setdefault(tensor.device, _DeviceLeaves())
        if part is None:
            of_device.views.append(_view(self._segment, place.at, tensor))
            of_device.indexes.append(index)
        else:
            later = of_device.later.get(part) or of_device.later.setdefault(part, _SlotViews(self._segment))
            later.at.append(place.at)
            later.indexes.append(index)

    def _plan_deferred(self, plan: _CopyPlan, of_device: _DeviceLeaves, leaves: Leaves) -> None:
        """The part that is equal in every save of the leaves of a device that are deferred."""
        copies, tensors = list[int](), list[torch.Tensor]()
        of_device.first = len(plan.waiting.indexes)
        for part, views in of_device.later.items():
            first = len(plan.waiting.indexes)
            views.among = slice(first, first + len(views.indexes))
            plan.waiting.add(views.indexes, leaves, [part] * len(views.indexes), unread)
            copies += [self._address + at for at in views.at]
            tensors += [leaves.tensors[i] for i in views.indexes]
        of_device.samples = sample_places(copies, tensors)


def _view(segment: Segment, at: int, tensor: torch.Tensor) -> torch.Tensor:
    """The place of a tensor in a slot."""
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    flat = torch.frombuffer(segment.map, dtype=torch.uint8, count=tensor.nbytes, offset=at)
    return flat.view(tensor.dtype).view(tensor.shape)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes in host memory are its elements, in order."""
    return tensor.is_cpu and not has_device(tensor) and is_in_order(tensor)
