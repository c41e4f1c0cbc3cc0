"""Transfers: copies from the tensors of a training loop into a slot, from host memory and from GPUs.

The training thread begins a transfer, and another thread may copy. Host memory is copied without holding the GIL. A GPU
copies on a side stream, which waits for the work that was enqueued on the current stream before the save.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from ckpt.capture.leaves import Leaves, StateLeaf
from ckpt.saver.segment import Segment
from ckpt.snapshot.guard import Guard, Sample, sample
from ckpt.streams import on_stream, side_stream
from ckptstore.format.shards import Placed

logger = logging.getLogger(__name__)

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

    def add_moves(self, moves: Sequence[Move], leaves: Leaves, samples: Sequence[Sample]) -> None:
        """Defer copies of host memory; call it before all other add methods. Keeps the memory alive until then."""
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

    def add_device_copy(self, view: torch.Tensor, leaf: StateLeaf, later: bool) -> None:
        """Copy from a GPU, in the order of the current stream or deferred."""
        device = leaf.tensor.device
        if device not in self._devices:
            self._devices[device] = DeviceCopies(device)
        if later:
            self._add_later(leaf)
        self._devices[device].add(view, leaf.tensor, later)

    def _add_later(self, leaf: StateLeaf) -> None:
        self.later.append(leaf)
        self.samples.append(sample(leaf.tensor))
        self.storages.append(leaf.tensor.untyped_storage())

    @property
    def under_way(self) -> bool:
        """Whether copies are deferred, or a GPU is copying."""
        return bool(self.later or self._devices)

    def begun(self) -> None:
        """Order deferred copies of GPUs after the work enqueued so far."""
        for copies in self._devices.values():
            copies.begun()

    @torch.no_grad()
    def copy(self, guard: Guard) -> None:
        """Copy host memory, and start the copies of GPUs. guard: checks the leaves in host memory."""
        for copies in self._devices.values():
            copies.copy()
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

    def finish(self) -> None:
        """Return when the slot holds everything."""
        for copies in self._devices.values():
            copies.finish()

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


class DeviceCopies:
    """Copies from one GPU into pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._later: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # A thread that waits for it sleeps instead of spinning.
        self._done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def add(self, view: torch.Tensor, tensor: torch.Tensor, later: bool) -> None:
        """Copy a tensor, in the order of the current stream or deferred.

        The tensor is kept until `release`: the allocator must not reuse memory that another stream reads.
        """
        if later:
            self._later.append((view, tensor.detach()))
        else:
            _enqueue(view, tensor)

    def begun(self) -> None:
        """Record the point of the current stream at which the state is complete."""
        stream = torch.cuda.current_stream(self._device)
        self._ready.record(stream)
        self._done.record(stream)

    def copy(self) -> None:
        """Enqueue the copies on the side stream, concurrent with later work of the current stream."""
        if not self._later:
            return
        stream = side_stream(self._device)
        with on_stream(stream):
            stream.wait_event(self._ready)
            for view, tensor in self._later:
                _enqueue(view, tensor)
        self._done.record(stream)

    def make_stream_wait(self) -> None:
        """Make the current stream wait for the copy; the CPU does not wait."""
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def finish(self) -> None:
        """Wait for the copy on the CPU, without holding the GIL."""
        self._done.synchronize()

    def release(self) -> None:
        """Release tensor references."""
        self._later = []


def _enqueue(view: torch.Tensor, tensor: torch.Tensor) -> None:
    """Enqueue the copy of a GPU tensor to host memory."""
    # By default torch conjugates and negates in host memory, where the bytes have not arrived yet.
    view.copy_(tensor.resolve_conj().resolve_neg(), non_blocking=True)


def pin(segment: Segment, device: torch.device) -> None:
    """Page-lock a segment, so that GPUs copy into it asynchronously. It is unlocked before it is unmapped.

    If the system refuses, logs a warning that copies take longer.
    """
    # In a separate thread: CUDA keeps the last error per thread, and torch attributes it to its next kernel.
    with ThreadPoolExecutor(1, thread_name_prefix="ckpt-pin") as thread:
        code = thread.submit(_register, segment, device).result()
    if code:
        logger.warning("%d bytes cannot be pinned (CUDA error %d): copies take longer", segment.num_bytes, code)


def _register(segment: Segment, device: torch.device) -> int:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = ctypes.addressof(segment.map)
    with torch.cuda.device(device):
        code = int(cudart.cudaHostRegister(address, max(1, segment.num_bytes), 0))
    if not code:
        weakref.finalize(segment.map, _unregister, address, device, os.getpid()).atexit = False
    return code


def _unregister(address: int, device: torch.device, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has neither the memory nor CUDA
        with torch.cuda.device(device):
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
