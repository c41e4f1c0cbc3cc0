"""Copies from one device into a slot, and the page-locking of slots.

Rules: the side stream starts after the work that was queued at the call. Every stream that is about to change the state
waits for the copies, each once. Tensors and the slot are held until the device has finished, also after a failure.
Memory that is not pinned is never the destination of an asynchronous copy: the driver would block other threads.

A device gathers some leaves in memory of its own first. Small ones, because every copy to the host is a launch:
together they are one copy, from which the CPU moves each to its place. And state that cannot wait at the gate: training
changes it while the gathered bytes are copied.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TypeAlias

from ckpt.device import Device, Mark, Patience
from ckpt.host.segment import Segment
from ckpt.lazily import torch
from ckpt.snapshot.guard import DeviceGuard, Move, Part, SamplePlaces, Watch, as_moves, is_in_order, move_all

logger = logging.getLogger(__name__)

SMALL_BYTES = 64 << 10
_TOGETHER_BYTES = 64 << 20
"""Leaves of one type are gathered up to this size, larger ones alone."""

Pairs: TypeAlias = "tuple[list[torch.Tensor], list[torch.Tensor]]"
"""Copy to, and copy from."""
Queue: TypeAlias = "Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]"
"""Queues copies: to these tensors, from these."""


class GatheredLeaves:
    """Leaves in memory of the device. `copy` once, then `place` when the device has finished."""

    def __init__(self, device: Device, pairs: Pairs, side: bool) -> None:
        """Queue the gathering on the side stream or on the current stream. Raises RuntimeError without memory."""
        self._device = device
        self._moves: list[Move] = []
        self._kept: list[torch.Tensor] = []
        self._lock = threading.Lock()
        self._groups = [(views, device.gather(tensors, side)) for views, tensors in _groups(pairs)]
        """The places of leaves, and their elements one after the other."""

    def copy(self, queue: Queue) -> None:
        """Queue the copies to the host."""
        for views, gathered in self._groups:
            memory = self._host_memory(views, gathered)
            if memory is None:
                flat = [view.view(-1) for view in views]
                queue(flat, torch.split(gathered, [view.numel() for view in views]))
                continue
            queue([memory.view(gathered.dtype)], [gathered])
            self._kept.append(memory)
            at = memory.data_ptr()
            for view in views:
                self._moves.append((view.data_ptr(), at, view.nbytes))
                at += view.nbytes

    def _host_memory(self, views: list[torch.Tensor], gathered: torch.Tensor) -> torch.Tensor | None:
        """Host memory for one copy of small leaves; None: each is copied to its place."""
        if len(views) == 1 or any(view.nbytes > SMALL_BYTES for view in views):
            return None
        try:
            return self._device.pinned(gathered.nbytes)
        except RuntimeError:  # no memory can be pinned
            return None

    def place(self) -> None:
        """Move what lies together to its places. For any thread."""
        with self._lock:
            move_all(as_moves(self._moves))
            self._moves, self._kept = [], []


def _groups(pairs: Pairs) -> list[Pairs]:
    """Leaves of one type, small enough to be gathered together."""
    groups: list[Pairs] = []
    filling: dict[torch.dtype, tuple[Pairs, int]] = defaultdict(lambda: (([], []), _TOGETHER_BYTES))
    for view, tensor in zip(*pairs, strict=True):
        group, size = filling[view.dtype]
        if size + view.nbytes > _TOGETHER_BYTES:
            group, size = ([], []), 0
            groups.append(group)
        group[0].append(view)
        group[1].append(tensor)
        filling[view.dtype] = (group, size + view.nbytes)
    return groups


PIN_BYTES = 256 << 20
"""Page-locking takes about 0.1 s per GB, and the driver blocks other processes of the host meanwhile."""
_PIN_LEAST_BYTES = 16 << 20
_PIN_PAUSE_S = 0.005
_RING_BYTES = 32 << 20
_LAUNCHES = 768
"""How many are pending on the side stream at most. About a thousand fill the queue of a device: further ones block."""
_SLICE = 64
"""Leaves that are queued at once."""

Views: TypeAlias = "Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]"
"""Makes the tensors in the slot that some leaves are copied to."""


@dataclass
class DeviceCopies:
    """The copies of one snapshot from one device. The training thread begins, another one may copy.

    Keep them until the device has finished: the allocator must not reuse memory that is still to be read.
    """

    _device: Device
    _pinned: bool
    """Whether the slot is page-locked."""
    _watch: Watch
    _now: Pairs
    """Copied in the order of the current stream."""
    _later: Mapping[Part, tuple[Views, list[torch.Tensor]]]
    """Copied when it is their part's turn; the views are made by the thread that copies."""
    _places: Sequence[SamplePlaces]
    """Where these are sampled, numbered in this order."""

    def __post_init__(self) -> None:
        detach, (views, now), later = torch.Tensor.detach, self._now, self._later.items()
        self._now = (views, list(map(detach, now)))
        self._later = {part: (views, list(map(detach, found))) for part, (views, found) in later}
        self._gathered: list[GatheredLeaves] = []
        self._ahead: GatheredLeaves | None = None
        """Leaves that cannot wait at the gate, gathered at the call."""
        self.ahead_bytes = self.in_order_bytes = 0
        """Their bytes: gathered at the call, or copied to the host in the order of the current stream."""
        self._ready: Mark | None = None
        self._done: Mark | None = None
        self._part_done: dict[Part, Mark] = {}
        self._waiting: set[tuple[Hashable, Mark]] = set()
        self._guard = DeviceGuard(self._device)
        self._lock = threading.Lock()
        self._patience = Patience()
        self._queued: deque[tuple[Mark, int]] = deque()
        """The ends of the slices on the side stream, and their launches."""
        self._launches = 0

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        """All that are read."""
        return chain(self._now[1], *(tensors for _, tensors in self._later.values()))

    def begun(self) -> None:
        """Queue what cannot wait, and mark the point of the current stream where the state is complete.

        Leaves that were not deferred are copied in the order of this stream: to the host; or to memory of the device,
        if there is enough, and beside training to the host.
        """
        try:
            self._begin_now()
            self._guard.sample(self._places)
        finally:
            self._ready = self._done = self._device.mark(side=False)

    def _begin_now(self) -> None:
        small, large = self._by_size(self._now)
        size = sum(view.nbytes for view in large[0]) if self._pinned else 0
        with suppress(RuntimeError):  # the device has less memory than it says, or does not say
            if self._watch.ahead and size and self._device.free_bytes() >= size:
                self._ahead, self.ahead_bytes = GatheredLeaves(self._device, large, side=False), size
        if self._ahead is None:
            self.in_order_bytes = size
            self._queue(*large, side=False)
        self._gather(small, side=False)

    def start(self, patience: Patience) -> None:
        """Wait until the state is complete. Raises SaveFailed, as `copy` does, if time has expired.

        Copies that were queued behind a long backlog would fill the launch queue of the process, and launches of the
        training thread would block.
        """
        self._patience = patience
        if not self._later and self._ahead is None:
            return
        assert self._ready is not None
        patience.wait_for(self._ready)
        self._device.wait(self._ready, side=True)
        if self._later and self._watch.digests:
            try:
                self._guard.digest([tensor for _, tensors in self._later.values() for tensor in tensors], self._slices)
            finally:
                self._done = self._device.mark(side=True)

    def copy(self, part: Part) -> None:
        """Queue the copies of a part on the side stream, concurrent with later work of other streams."""
        if part not in self._later:
            return
        try:
            small, large = self._by_size(self._pairs(part))
            self._queue(*large, side=True)
            self._gather(small, side=True)
        finally:
            self._done = self._part_done[part] = self._device.mark(side=True)

    def copy_gathered(self) -> None:
        """Queue the copies to the host of what was gathered at the call. Nothing waits for them."""
        if self._ahead is not None:
            self._gathered.append(self._ahead)
            try:
                self._ahead.copy(partial(self._queue, side=True))
            finally:
                self._done = self._device.mark(side=True)

    def make_stream_wait(self, parts: Iterable[Part]) -> None:
        """Make the current stream wait for the copies of these parts, and for those that were not deferred, each once.

        The CPU does not wait.
        """
        assert self._ready is not None
        with self._lock:
            stream = self._device.current()
            marks = [self._part_done[part] for part in parts if part in self._part_done]
            for mark in [self._ready, *marks]:
                if (stream, mark) not in self._waiting and not mark.done():
                    self._device.wait(mark, side=False)
                self._waiting.add((stream, mark))

    def done(self) -> bool:
        """Whether the device has finished all copies that were queued."""
        return self._done is None or self._done.done()

    def place(self) -> None:
        """Move small leaves to their places; the device has finished. For any thread."""
        for gathered in self._gathered:
            gathered.place()

    def torn(self) -> list[int]:
        """Numbers of the deferred leaves that had changed when they were copied. Call it after `place`."""
        return self._guard.torn([view for part in self._later for view in self._pairs(part)[0]])

    def _pairs(self, part: Part) -> Pairs:
        """The deferred copies of a part."""
        views, tensors = self._later[part]
        return list(views(tensors)), tensors

    def _by_size(self, pairs: Pairs) -> tuple[Pairs, Pairs]:
        """The small ones, if there are several to be gathered, and the rest. Only pinned memory gets them so."""
        found: tuple[Pairs, Pairs] = (([], []), ([], []))
        if not self._pinned:
            return found[0], pairs
        for view, tensor in zip(*pairs, strict=True):
            views, tensors = found[view.nbytes > SMALL_BYTES]
            views.append(view)
            tensors.append(tensor)
        return found if len(found[0][0]) > 1 else (([], []), pairs)

    def _gather(self, pairs: Pairs, side: bool) -> None:
        if pairs[0]:
            try:
                gathered = GatheredLeaves(self._device, pairs, side)
            except RuntimeError:  # no memory: a launch for each
                self._queue(*pairs, side)
                return
            self._gathered.append(gathered)
            gathered.copy(partial(self._queue, side=side))

    def _queue(self, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], side: bool) -> None:
        if self._pinned:
            for part in self._slices(len(tensors), launches=1) if side else [slice(None)]:
                self._device.copy(views[part], tensors[part], side)
        elif tensors:
            self._copy_through_ring(views, tensors, side)

    def _slices(self, leaves: int, launches: int) -> Iterator[slice]:
        """Parts of as many leaves, each when it may be queued on the side stream. launches: for each leaf."""
        for at in range(0, leaves, _SLICE):
            new = launches * min(_SLICE, leaves - at)
            while self._queued and self._launches + new > _LAUNCHES:
                mark, done = self._queued.popleft()
                self._patience.wait_until(mark.done)
                self._launches -= done
            self._patience.check()
            yield slice(at, at + _SLICE)
            self._queued.append((self._device.mark(side=True), new))
            self._launches += new

    def _copy_through_ring(self, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], side: bool) -> None:
        """Copy through a little pinned memory, and wait for each piece."""
        ring = self._device.pinned(_RING_BYTES)
        for view, tensor in zip(views, tensors, strict=True):
            whole = tensor.view(-1) if is_in_order(tensor) else self._device.gather([tensor], side)
            to, size = view.view(-1), tensor.element_size()
            for at in range(0, whole.numel(), _RING_BYTES // size):
                piece = whole[at : at + _RING_BYTES // size]
                staged = ring[: piece.nbytes].view(piece.dtype)
                self._device.copy([staged], [piece], side)
                self._patience.wait_until(self._device.mark(side).done)
                ctypes.memmove(to[at:].data_ptr(), staged.data_ptr(), piece.nbytes)


def pin_segment(segment: Segment, device: Device, ranks: int = 0) -> bool:
    """Page-lock a segment, so that GPUs copy into it asynchronously. It is unlocked before it is unmapped.

    ranks: of this host that do so beside training; their launches get as much time in between.
    If the system refuses, logs a warning that copies take longer, and returns False.
    """
    # In a separate thread: CUDA keeps the last error per thread, and torch attributes it to its next kernel.
    with ThreadPoolExecutor(1, thread_name_prefix="ckpt-pin") as thread:
        addresses, code = thread.submit(_pin, ctypes.addressof(segment.map), segment.num_bytes, device, ranks).result()
    if code:
        logger.warning("%d bytes cannot be pinned (CUDA error %d): copies take longer", segment.num_bytes, code)
        return False
    segment.before_unmap(partial(_unpin_chunks, addresses, device))
    return True


def _pin(address: int, num_bytes: int, device: Device, ranks: int) -> tuple[list[int], int]:
    """The addresses of the chunks that were pinned: all, or none and the error code. One chunk, if need be."""
    for size in (PIN_BYTES, num_bytes):
        addresses, code = _pin_chunks(address, num_bytes, device, ranks, size)
        if len(addresses) < 2 or device.crosses(addresses[1]):
            return addresses, code
        _unpin_chunks(addresses, device)
    return [], 1


def _pin_chunks(address: int, num_bytes: int, device: Device, ranks: int, size: int) -> tuple[list[int], int]:
    addresses, at = list[int](), 0
    while at < num_bytes:
        began = time.perf_counter()
        code = device.pin(address + at, min(size, num_bytes - at))
        if not code:
            addresses.append(address + at)
            at += size
            if at < num_bytes:
                time.sleep(_PIN_PAUSE_S + ranks * (time.perf_counter() - began))
        elif size > _PIN_LEAST_BYTES:
            size //= 2  # some kernels limit the size of one call
        else:
            _unpin_chunks(addresses, device)
            return [], code
    return addresses, 0


def _unpin_chunks(addresses: Sequence[int], device: Device) -> None:
    if codes := {code for address in addresses if (code := device.unpin(address))}:
        logger.warning("memory of a snapshot could not be unpinned (CUDA errors %s)", sorted(codes))
