"""Transfers: copies from the tensors of a training loop into a slot, from host memory and from GPUs.

The training thread begins a transfer, and another thread may copy. Host memory is copied without holding the GIL. A GPU
copies on a side stream, which waits for the work that was enqueued on the current stream before the save.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

from ckpt.capture.leaves import Leaves, StateLeaf
from ckpt.device import DEVICES, Patience, poll
from ckpt.lazily import torch
from ckpt.snapshot.device_copies import DeviceCopies, Views
from ckpt.snapshot.device_guard import SamplePlaces, Watch
from ckpt.snapshot.guard import Guard, Sample, sample
from ckpt.snapshot.progress import CopyProgress, Part
from ckptstore.format.shards import Placed

Move = tuple[int, int, int]
"""Address to copy to, address to copy from, and number of bytes."""

_MOVED_BYTES = 16 << 20
"""Before each copy of this size the address of the storage is checked."""

GatheredRun = tuple[int, int, int]
"""Address to copy to, offset in the gathered bytes to copy from, and number of bytes."""


class Transfer:
    """The copy of one snapshot: `copy` once, then `finish`.

    `make_streams_wait` belongs to the training thread.
    """

    def __init__(self, frozen: Sequence[Placed] = ()) -> None:
        self.frozen = frozen
        """The copies in the slot of large leaves that are expected not to change."""
        self.later = Leaves()
        """The leaves deferred to `copy`."""
        self.samples: list[Sample] = []
        """Samples of each deferred leaf, for its guard."""
        self.storages: list[torch.UntypedStorage] = []
        """The storage of each deferred leaf. Holding them keeps the memory alive."""
        self.parts: dict[Part, list[int]] = {}
        """Indexes of the deferred leaves by part."""
        self.progress = CopyProgress(())
        """Which parts are copied: host memory is, and the copies of devices are queued."""
        self._watch = Watch()
        self._moves: Sequence[Move] = ()
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Copy to, and copy from, by index of the deferred leaf."""
        self._kept: list[object] = []
        self._devices: dict[torch.device, DeviceCopies] = {}
        self._gathered: Sequence[Move] = ()
        self._deferred: dict[torch.device, list[int]] = {}
        """Indexes of the deferred leaves of devices, in the order of their copies."""

    def add_moves(
        self, moves: Sequence[Move], leaves: Leaves, samples: Sequence[Sample], parts: Mapping[Part, Sequence[int]]
    ) -> None:
        """Defer copies of host memory; call it before all other add methods. Keeps the memory alive until then.

        leaves: those of the moves, then the leaves of devices that are deferred. parts: their indexes, by part.
        """
        self.later, self.samples = leaves, list(samples)
        self.parts = {part: list(indexes) for part, indexes in parts.items()}
        self._moves = moves
        self.storages = list(map(torch.Tensor.untyped_storage, leaves.tensors))

    def add_gathered(self, data: bytes, runs: Sequence[GatheredRun]) -> None:
        """Defer copying the gathered bytes to their places in the slot."""
        kept = ctypes.c_char_p(data)
        self._kept.append(kept)
        begin = ctypes.cast(kept, ctypes.c_void_p).value or 0
        self._gathered = [(to, begin + at, size) for to, at, size in runs]

    def add_copy(self, view: torch.Tensor, leaf: StateLeaf, part: Part) -> None:
        """Defer the copy of a tensor in host memory whose bytes are not its elements in order."""
        self._copies[len(self.later)] = (view, leaf.tensor.detach())
        self.parts.setdefault(part, []).append(len(self.later))
        self.later.append(leaf)
        self.samples.append(sample(leaf.tensor))
        self.storages.append(leaf.tensor.untyped_storage())

    def add_device_copies(
        self, device: torch.device, pinned: bool, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Copy from a device in the order of the current stream. pinned: whether the slot is."""
        self._copies_of(device, pinned).add(views, tensors)

    def defer_device_copies(
        self, device: torch.device, pinned: bool, views: Views, indexes: Sequence[int], part: Part
    ) -> None:
        """Defer copies from a device. indexes: those of the leaves among the deferred ones."""
        self._deferred.setdefault(device, []).extend(indexes)
        self._copies_of(device, pinned).defer(views, [self.later.tensors[i] for i in indexes], part)

    def sample_on_device(self, device: torch.device, places: Sequence[SamplePlaces]) -> None:
        """Sample the deferred leaves of a device, which are numbered in the order of their copies."""
        self._devices[device].sample(places)

    def _copies_of(self, device: torch.device, pinned: bool) -> DeviceCopies:
        if device not in self._devices:
            self._devices[device] = DeviceCopies(DEVICES[device.type](device), pinned)
        return self._devices[device]

    @property
    def on_devices(self) -> bool:
        """Whether a device copies some of it."""
        return bool(self._devices)

    @property
    def deferred_on_devices(self) -> bool:
        """Whether a device copies leaves while training continues."""
        return bool(self._deferred)

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

    def begun(self, watch: Watch) -> None:
        """Order deferred copies of GPUs after the work enqueued so far."""
        self._watch = watch
        self.progress = CopyProgress(self.parts)
        for copies in self._devices.values():
            copies.begun(watch)

    def copy(self, guard: Guard, patience: Patience) -> None:
        """Copy host memory, and start the copies of GPUs. guard: checks the leaves in host memory."""
        with torch.no_grad():
            left = self._copy_host_memory(guard)
            self._copy_devices(left, patience)

    def _copy_host_memory(self, guard: Guard) -> dict[Part, None]:
        """Returns the parts of which devices copy leaves."""
        move_all(self._gathered)
        on_host = {part: deque(i for i in found if self._is_on_host(i)) for part, found in self.parts.items()}
        left = {part: indexes for part, indexes in on_host.items() if indexes}
        devices = {part for copies in self._devices.values() for part in copies.parts}
        while left:
            part = self.progress.next(left)
            self._copy_leaf(left[part].popleft(), guard)
            if not left[part]:
                del left[part]
                if part not in devices:
                    self.progress.copied(part)
        return dict.fromkeys(part for part in self.parts if part in devices)

    def _is_on_host(self, index: int) -> bool:
        return index < len(self._moves) or index in self._copies

    def _copy_leaf(self, index: int, guard: Guard) -> None:
        if index in self._copies:
            view, tensor = self._copies[index]
            if not guard.moved(index):
                view.copy_(tensor)
                guard.copied(index, view.data_ptr(), view.nbytes)
            return
        to, source, size = self._moves[index]
        for at in range(0, size, _MOVED_BYTES):
            if guard.moved(index):
                break
            num_bytes = min(_MOVED_BYTES, size - at)
            ctypes.memmove(to + at, source + at, num_bytes)
            guard.copied(index, to + at, num_bytes)

    def _copy_devices(self, left: dict[Part, None], patience: Patience) -> None:
        for copies in self._devices.values():
            copies.start(self._watch, patience)
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
        found = [self._deferred[device][n] for device, copies in self._devices.items() for n in copies.torn()]
        return [self.later.slices[index].entry for index in found]

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
        for copies in self._devices.values():
            copies.release()
        self.later, self.samples, self.storages, self._moves, self._gathered = Leaves(), [], [], (), ()
        self._copies, self._kept = {}, []


def move_all(moves: Iterable[Move]) -> None:
    """Copy memory."""
    # torch copies with all of its threads and waits for the slowest: several times slower than one
    # thread as soon as a core is busy, for example with the saver. memmove releases the GIL.
    for to, source, size in moves:
        ctypes.memmove(to, source, size)
