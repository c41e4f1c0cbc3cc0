"""Transfers: copies from the tensors of a training loop into a slot, from host memory and from GPUs.

The training thread begins a transfer, and another thread may copy. Host memory is copied without holding the GIL. A GPU
copies on a side stream, which waits for the work that was enqueued on the current stream before the save.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence

from ckpt.capture.leaves import Leaves, StateLeaf
from ckpt.device import DEVICES, Patience, poll
from ckpt.lazily import torch
from ckpt.snapshot.device_copies import DeviceCopies
from ckpt.snapshot.guard import Guard, Sample, sample
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
        self._moves: Sequence[Move] = ()
        self._copies: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        """Copy to, copy from, and the index of the deferred leaf."""
        self._kept: list[object] = []
        self._devices: dict[torch.device, DeviceCopies] = {}
        self._gathered: Sequence[Move] = ()
        self._deferred: dict[torch.device, list[int]] = {}
        """Numbers of the deferred leaves of devices, which follow those of the moves."""
        self._num_deferred = 0

    def add_moves(self, moves: Sequence[Move], leaves: Leaves, samples: Sequence[Sample]) -> None:
        """Defer copies of host memory; call it before all other add methods. Keeps the memory alive until then.

        leaves: those of the moves, then the leaves of devices that are deferred.
        """
        self.later, self.samples = leaves, list(samples)
        self._moves = moves
        self.storages = list(map(torch.Tensor.untyped_storage, leaves.tensors))

    def add_gathered(self, data: bytes, runs: Sequence[GatheredRun]) -> None:
        """Defer copying the gathered bytes to their places in the slot."""
        kept = ctypes.c_char_p(data)
        self._kept.append(kept)
        begin = ctypes.cast(kept, ctypes.c_void_p).value or 0
        self._gathered = [(to, begin + at, size) for to, at, size in runs]

    def add_copy(self, view: torch.Tensor, leaf: StateLeaf) -> None:
        """Defer the copy of a tensor in host memory whose bytes are not its elements in order."""
        self._copies.append((view, leaf.tensor.detach(), len(self.later)))
        self._add_later(leaf)

    def add_device_copies(
        self,
        device: torch.device,
        pinned: bool,
        views: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        later: bool,
    ) -> None:
        """Copy from a device, in the order of the current stream or deferred. Deferred leaves are those of `add_moves`.

        pinned: whether the slot is.
        """
        if later:
            self._deferred.setdefault(device, []).extend(range(self._num_deferred, self._num_deferred + len(tensors)))
            self._num_deferred += len(tensors)
        if device not in self._devices:
            self._devices[device] = DeviceCopies(DEVICES[device.type](device), pinned)
        self._devices[device].add(views, tensors, later)

    def _add_later(self, leaf: StateLeaf) -> None:
        self.later.append(leaf)
        self.samples.append(sample(leaf.tensor))
        self.storages.append(leaf.tensor.untyped_storage())

    @property
    def on_devices(self) -> bool:
        """Whether a device copies some of it."""
        return bool(self._devices)

    @property
    def deferred_on_devices(self) -> bool:
        """Whether a device copies leaves while training continues."""
        return bool(self._num_deferred)

    @property
    def under_way(self) -> bool:
        """Whether copies are deferred, or a GPU is copying."""
        return bool(self.later or self._devices)

    def begun(self, watch: bool = False) -> None:
        """Order deferred copies of GPUs after the work enqueued so far. watch: detect changes from here on."""
        for copies in self._devices.values():
            copies.begun(watch)

    def copy(self, guard: Guard, patience: Patience) -> None:
        """Copy host memory, and start the copies of GPUs. guard: checks the leaves in host memory."""
        with torch.no_grad():
            self._copy_host_memory(guard)
            for copies in self._devices.values():
                copies.copy(patience)

    def _copy_host_memory(self, guard: Guard) -> None:
        move_all(self._gathered)
        for index, (to, source, size) in enumerate(self._moves):
            for at in range(0, size, _MOVED_BYTES):
                if guard.moved(index):
                    break
                num_bytes = min(_MOVED_BYTES, size - at)
                ctypes.memmove(to + at, source + at, num_bytes)
                guard.copied(index, to + at, num_bytes)
        for view, tensor, index in self._copies:
            if not guard.moved(index):
                view.copy_(tensor)
                guard.copied(index, view.data_ptr(), view.nbytes)

    def make_streams_wait(self) -> None:
        """Order later work of the current streams after the copy. Does not wait. Call it after `copy`."""
        for copies in self._devices.values():
            copies.make_stream_wait()

    def torn(self) -> list[str]:
        """Entries that had changed when devices copied them. Call it after `finish`."""
        found = [self._deferred[device][n] for device, copies in self._devices.items() for n in copies.torn()]
        return [self.later.slices[len(self._moves) + number].entry for number in found]

    def finish(self, expired: Callable[[], bool] | None = None) -> bool:
        """Wait until the devices have finished their copies. False if time has expired before. For any thread."""
        return all(poll(copies.done, expired) for copies in self._devices.values())

    def release(self) -> None:
        """Release the tensors. Call it after `finish`."""
        for copies in self._devices.values():
            copies.release()
        self.later, self.samples, self.storages, self._moves, self._gathered = Leaves(), [], [], (), ()
        self._copies, self._kept = [], []


def move_all(moves: Iterable[Move]) -> None:
    """Copy memory."""
    # torch copies with all of its threads and waits for the slowest: several times slower than one
    # thread as soon as a core is busy, for example with the saver. memmove releases the GIL.
    for to, source, size in moves:
        ctypes.memmove(to, source, size)
