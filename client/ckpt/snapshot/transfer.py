"""Transfers: what is on its way from the tensors of a training loop into a slot, from host memory and from GPUs.

Begun on the training thread, copied by another one. Host memory is copied by a thread that does not hold the GIL. A GPU
copies by itself, on a stream of its own, which waits for what was asked of the current stream before the save.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from ckpt.capture.leaves import Leaf, Leaves
from ckpt.saver.segment import Segment
from ckpt.snapshot.guard import RawMemory, sample
from ckpt.streams import on_stream, side_stream
from ckptstore.format.shards import Placed

logger = logging.getLogger(__name__)

Move = tuple[int, int, int]
"""Addresses to copy to and from, and bytes."""

GatheredRun = tuple[int, int, int]
"""Address to copy to, where in gathered bytes to copy from, and bytes."""


class Transfer:
    """One snapshot on its way. `copy` once, then `finish`; `hold` and `again` belong to the training thread."""

    def __init__(self, frozen: Sequence[Placed] = ()) -> None:
        self.frozen = frozen
        """What is copied of large leaves that nobody should change."""
        self.later = Leaves()
        """What is left for `copy`."""
        self.samples: list[RawMemory] = []
        """Of each of these."""
        self._moves: Sequence[Move] = ()
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._kept: list[object] = []
        self._devices: dict[torch.device, DeviceCopies] = {}
        self._gathered: Sequence[Move] = ()

    def add_moves(self, moves: Sequence[Move], leaves: Leaves, samples: Sequence[RawMemory]) -> None:
        """Copy memory later, before anything else is added. It lives until then, whatever becomes of the tensors."""
        self.later, self.samples = leaves, list(samples)
        self._moves = moves
        self._kept += map(torch.Tensor.untyped_storage, leaves.tensors)

    def add_gathered(self, data: bytes, runs: Sequence[GatheredRun]) -> None:
        """Put later in its place what was copied already."""
        kept = ctypes.c_char_p(data)
        self._kept.append(kept)
        begin = ctypes.cast(kept, ctypes.c_void_p).value or 0
        self._gathered = [(to, begin + at, size) for to, at, size in runs]

    def add_copy(self, view: torch.Tensor, leaf: Leaf) -> None:
        """Copy a tensor of host memory later that is not plain memory."""
        self._add_later(leaf)
        self._copies.append((view, leaf.tensor.detach()))

    def add_device_copy(self, view: torch.Tensor, leaf: Leaf, later: bool) -> None:
        """Copy from a GPU, in the order of the current stream or later."""
        device = leaf.tensor.device
        if device not in self._devices:
            self._devices[device] = DeviceCopies(device)
        if later:
            self._add_later(leaf)
        self._devices[device].add(view, leaf.tensor, later)

    def _add_later(self, leaf: Leaf) -> None:
        self.later.append(leaf)
        self.samples.append(sample(leaf.tensor))

    @property
    def under_way(self) -> bool:
        """Whether something is still to be copied, or is being copied by a GPU."""
        return bool(self.later or self._devices)

    def begun(self) -> None:
        """All that was asked of GPUs so far comes first."""
        for copies in self._devices.values():
            copies.begun()

    @torch.no_grad()
    def copy(self) -> None:
        """Copy host memory, and have the GPUs begin."""
        for copies in self._devices.values():
            copies.copy()
        move_all(self._gathered)
        self._copy_memory()

    def _copy_memory(self) -> None:
        move_all(self._moves)
        for view, tensor in self._copies:
            view.copy_(tensor)

    def make_streams_wait(self) -> None:
        """What is asked of the current streams from now on comes after the copy. Does not wait. After `copy`."""
        for copies in self._devices.values():
            copies.make_streams_wait()

    @torch.no_grad()
    def copy_again(self) -> None:
        """Copy what was left for later once more, as it is now. After `copy`."""
        for copies in self._devices.values():
            copies.copy_again()
        self._copy_memory()

    def finish(self) -> None:
        """Return when the slot holds everything."""
        for copies in self._devices.values():
            copies.finish()

    def release(self) -> None:
        """What was copied will not be copied again: its memory may go. After `finish`."""
        for copies in self._devices.values():
            copies.release()
        self.later, self.samples, self._moves, self._gathered = Leaves(), [], (), ()
        self._copies, self._kept = [], []


def move_all(moves: Iterable[Move]) -> None:
    """Copy memory."""
    # torch copies with all of its threads and waits for the slowest: several times slower than one
    # thread as soon as a core is busy, with the saver for instance. memmove releases the GIL.
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
        """Copy a tensor, in the order of the current stream or later. It is kept until the copy is done: memory that is
        used on another stream must not be given out again."""
        if later:
            self._later.append((view, tensor.detach()))
        else:
            _ask(view, tensor)

    def begun(self) -> None:
        """The state is complete when the current stream has come this far."""
        stream = torch.cuda.current_stream(self._device)
        self._ready.record(stream)
        self._done.record(stream)

    def copy(self) -> None:
        """Have the side stream copy, beside whatever the current stream does next."""
        if not self._later:
            return
        stream = side_stream(self._device)
        with on_stream(stream):
            stream.wait_event(self._ready)
            self._enqueue()
        self._done.record(stream)

    def copy_again(self) -> None:
        """Copy in the order of the current stream, after the side stream has done so."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._done)
        with torch.cuda.device(self._device):
            self._enqueue()
        self._done.record(stream)

    def make_streams_wait(self) -> None:
        """The current stream waits for the copy; the CPU does not."""
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def finish(self) -> None:
        """The CPU waits for the copy, without the GIL."""
        self._done.synchronize()

    def release(self) -> None:
        """Keep no tensor any more."""
        self._later = []

    def _enqueue(self) -> None:
        for view, tensor in self._later:
            _ask(view, tensor)


def _ask(view: torch.Tensor, tensor: torch.Tensor) -> None:
    """Have the GPU copy a tensor to host memory."""
    # Left to itself, torch conjugates and negates in host memory, where the bytes have not arrived yet.
    view.copy_(tensor.resolve_conj().resolve_neg(), non_blocking=True)


def pin(segment: Segment, device: torch.device) -> None:
    """Lock a segment's pages, so that GPUs copy into it by themselves. They are unlocked before it is unmapped.

    Where the system refuses, a warning says that copies will take longer.
    """
    # In a thread of its own: CUDA keeps the last error of each thread, and torch takes it for that of its next kernel.
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
