"""Copies from one device into a slot, and the page-locking of slots.

Rules: the side stream starts after the work that was queued at the call. Every stream that is about to change the state
waits for the copies, each once. Tensors and the slot are held until the device has finished, also after a failure.
Memory that is not pinned is never the destination of an asynchronous copy: the driver would block other threads.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from ckpt.device import Device, Mark, Patience, poll
from ckpt.lazily import torch
from ckpt.saver.segment import Segment

logger = logging.getLogger(__name__)

PIN_BYTES = 256 << 20
"""Page-locking takes about 0.1 s per GB, and the driver blocks other processes of the host meanwhile."""
_PIN_LEAST_BYTES = 16 << 20
_PIN_PAUSE_S = 0.005
_RING_BYTES = 32 << 20
_SAMPLE_BYTES = 64
_SAMPLED_LEAVES = 64


class _Samples:
    """Some bytes of each leaf, read before it is copied. If its copy has other bytes, it changed meanwhile.

    No other check reads memory of a device: a replayed graph, or a kernel that bypasses torch, moves no counter.
    """

    def __init__(
        self, device: Device, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], side: bool
    ) -> None:
        self._read: list[tuple[int, torch.Tensor, int]] = []
        """Index of the leaf, its sample, and the address where its copy has these bytes."""
        with suppress(RuntimeError):  # no memory can be pinned: the save goes on without samples
            self._begin(device, views, tensors, side)

    def _begin(
        self, device: Device, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], side: bool
    ) -> None:
        memory = device.pinned(_SAMPLE_BYTES * max(1, len(tensors)))
        sources, read = [], list[tuple[int, torch.Tensor, int]]()
        # From the call on all leaves; beside training some, because each takes 20 µs with the GIL.
        for index in range(0, len(tensors), max(1, len(tensors) // _SAMPLED_LEAVES) if side else 1):
            view, tensor = views[index], tensors[index]
            if not tensor.numel() or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
                continue
            count, at = min(tensor.numel(), _SAMPLE_BYTES // tensor.element_size()), tensor.numel() // 2
            source = tensor.detach().view(-1)[min(at, tensor.numel() - count) :][:count]
            sources.append(source)
            sample = memory[_SAMPLE_BYTES * index :][: source.nbytes]
            begin = (source.data_ptr() - tensor.data_ptr()) + view.data_ptr()
            read.append((index, sample.view(tensor.dtype), begin))
        device.copy([sample for _, sample, _ in read], sources, side)
        self._read = read

    def torn(self) -> list[int]:
        """Indexes of leaves that had changed when they were copied. The device has finished."""
        return [
            index
            for index, sample, begin in self._read
            if ctypes.string_at(begin, sample.nbytes) != ctypes.string_at(sample.data_ptr(), sample.nbytes)
        ]


class DeviceCopies:
    """The copies of one snapshot from one device. The training thread adds and begins, another one may copy."""

    def __init__(self, device: Device, pinned: bool) -> None:
        """pinned: whether the slot is page-locked."""
        self._device = device
        self._pinned = pinned
        self._now: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._later: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._ready: Mark | None = None
        self._done: Mark | None = None
        self._waiting: set[Hashable] = set()
        self._samples: _Samples | None = None
        self._lock = threading.Lock()

    def add(self, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], later: bool) -> None:
        """Copy tensors, in the order of the current stream or deferred.

        They are kept until `release`: the allocator must not reuse memory that is still to be read.
        """
        to, kept = self._later if later else self._now
        to += views
        kept += map(torch.Tensor.detach, tensors)

    def begun(self, watch: bool) -> None:
        """Queue the copies that cannot wait, and mark the point of the current stream where the state is complete.

        watch: detect changes from here on; otherwise from where `copy` begins, which costs this thread nothing.
        """
        try:
            self._queue(*self._now, side=False)
            if watch and self._later[0]:
                self._samples = _Samples(self._device, *self._later, side=False)
        finally:
            self._ready = self._done = self._device.mark(side=False)

    def copy(self, patience: Patience) -> None:
        """Queue the deferred copies on the side stream, concurrent with later work of other streams.

        Waits until the state is complete. Copies that were queued behind a long backlog would fill the launch queue of
        the process, and launches of the training thread would block.
        """
        if not self._later[0]:
            return
        assert self._ready is not None
        patience.wait_for(self._ready)
        self._device.wait(self._ready, side=True)
        try:
            if self._samples is None:
                self._samples = _Samples(self._device, *self._later, side=True)
            self._queue(*self._later, side=True)
        finally:
            self._done = self._device.mark(side=True)

    def make_stream_wait(self) -> None:
        """Make the current stream wait for the copies, once; the CPU does not wait."""
        assert self._done is not None
        with self._lock:
            stream = self._device.current()
            if stream not in self._waiting and not self._done.done():
                self._device.wait(self._done, side=False)
            self._waiting.add(stream)

    def done(self) -> bool:
        """Whether the device has finished all copies that were queued."""
        return self._done is None or self._done.done()

    def torn(self) -> list[int]:
        """Numbers of the deferred leaves that had changed when they were copied. Call it when all is done."""
        return [] if self._samples is None else self._samples.torn()

    def release(self) -> None:
        """Release tensor references."""
        self._samples = None
        self._now, self._later = ([], []), ([], [])

    def _queue(self, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], side: bool) -> None:
        if self._pinned:
            self._device.copy(views, tensors, side)
        elif tensors:
            self._copy_through_ring(views, tensors, side)

    def _copy_through_ring(self, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], side: bool) -> None:
        """Copy through a little pinned memory, and wait for each piece."""
        ring = self._device.pinned(_RING_BYTES)
        for view, tensor in zip(views, tensors, strict=True):
            whole = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
            to, size = view.view(-1), tensor.element_size()
            for at in range(0, whole.numel(), _RING_BYTES // size):
                piece = whole[at : at + _RING_BYTES // size]
                staged = ring[: piece.nbytes].view(piece.dtype)
                self._device.copy([staged], [piece], side)
                poll(self._device.mark(side).done)
                ctypes.memmove(to[at:].data_ptr(), staged.data_ptr(), piece.nbytes)


def pin_segment(segment: Segment, device: Device) -> bool:
    """Page-lock a segment, so that GPUs copy into it asynchronously. It is unlocked before it is unmapped.

    If the system refuses, logs a warning that copies take longer, and returns False.
    """
    # In a separate thread: CUDA keeps the last error per thread, and torch attributes it to its next kernel.
    with ThreadPoolExecutor(1, thread_name_prefix="ckpt-pin") as thread:
        addresses, code = thread.submit(_pin_chunks, ctypes.addressof(segment.map), segment.num_bytes, device).result()
    if code:
        logger.warning("%d bytes cannot be pinned (CUDA error %d): copies take longer", segment.num_bytes, code)
        return False
    segment.before_unmap(partial(_unpin_chunks, addresses, device, os.getpid()))
    return True


def _pin_chunks(address: int, num_bytes: int, device: Device) -> tuple[list[int], int]:
    """The addresses of the chunks that were pinned: all, or none and the error code."""
    addresses, at, size = list[int](), 0, PIN_BYTES
    while at < num_bytes:
        code = device.pin(address + at, min(size, num_bytes - at))
        if not code:
            addresses.append(address + at)
            at += size
            time.sleep(_PIN_PAUSE_S if at < num_bytes else 0)
        elif size > _PIN_LEAST_BYTES:
            size //= 2  # some kernels limit the size of one call
        else:
            _unpin_chunks(addresses, device, os.getpid())
            return [], code
    return addresses, 0


def _unpin_chunks(addresses: Sequence[int], device: Device, pid: int) -> None:
    if os.getpid() != pid:  # a forked child has neither the memory nor CUDA
        return
    if codes := {code for address in addresses if (code := device.unpin(address))}:
        logger.warning("memory of a snapshot could not be unpinned (CUDA errors %s)", sorted(codes))
