"""GpuReceiver: chunks are copied to device memory through a few staging buffers.

A chunk is read and decoded into a buffer as if that were its destination. Then the copies of its pieces are queued on
the side stream of the device, and the next chunk gets another buffer. A buffer is reused when all copies from it are
done.
"""

from __future__ import annotations

import logging
import threading
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from queue import SimpleQueue
from typing import Any

import torch
from msgspec.structs import replace

from ckpt.device import Device, Mark, poll
from ckptstore.format import boxes
from ckptstore.format.planning import ChunkRead, Piece, ShardRead, batches
from ckptstore.format.shards import CHUNK_BYTES
from ckptstore.reading.fetch import HostBuffers, Receiver

logger = logging.getLogger(__name__)

NUM_BUFFERS = 16
"""Two for each of the eight reading threads: one is filled while the other is emptied."""
STAGING_BYTES = 128 << 20
"""Total size of the buffers; at least two of the largest chunk."""
_STAGED = ""
"""Name of the staging buffer among the buffers of a chunk."""
_ALIGNED = 64
_ELEMENTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class BufferPool:
    """A few reused buffers: filled, emptied asynchronously, and filled again. Thread-safe.

    At most `num_buffers`, made on demand. The caller must give each one back, also after an error.
    """

    def __init__(self, num_buffers: int, make: Callable[[], Any]) -> None:
        self._make = make
        self._given: SimpleQueue[tuple[Any, Sequence[Mark]]] = SimpleQueue()
        """None: a buffer to be made."""
        for _ in range(num_buffers):
            self._given.put((None, ()))

    def take(self) -> Any:
        """A buffer that is empty: a new one, or else the one that was given back first, for which this waits.

        Raises the error of making or emptying a buffer. That buffer is dropped, and a later call makes another.
        """
        buffer, marks = self._given.get()
        try:
            for mark in marks:
                poll(mark.done)
            return self._make() if buffer is None else buffer
        except BaseException:
            self._given.put((None, ()))
            raise

    def give(self, buffer: Any, marks: Sequence[Mark]) -> None:
        """Give a buffer back; it is empty once the device has reached these marks."""
        self._given.put((buffer, marks))

    def drain(self) -> None:
        """Drop all buffers, each when it is empty; all were given back. Raises the error of emptying one."""
        while not self._given.empty():
            for mark in self._given.get()[1]:
                poll(mark.done)


@dataclass
class GpuTarget:
    """Tensors of one device that receive the same box of an entry."""

    _targets: Sequence[torch.Tensor]
    _dtype: torch.dtype
    device: Device

    def __post_init__(self) -> None:
        self.item = self._dtype.itemsize
        self._own = next((target for target in self._targets if is_direct(target, self._dtype)), None)
        self._memory: torch.Tensor | None = None
        self._left = self._targets[0].numel() * self.item
        self._lock = threading.Lock()

    @torch.no_grad()
    def put(self, piece: Piece, staged: torch.Tensor) -> None:
        """Copy the contiguous elements of a piece to their destination."""
        memory, item = self._bytes(), self.item
        steps = [stride // item for stride in piece.to_strides]
        to = memory.as_strided(piece.shape, steps, int(memory.storage_offset()) + piece.to // item)
        to.copy_(staged.view(memory.dtype).view(piece.shape), non_blocking=True)
        with self._lock:
            self._left -= staged.numel()
            complete = self._left == 0
        if complete:  # all elements have arrived: copy them to the other targets
            self._memory = None
            for target in self._targets:
                if target is not self._own:
                    target.copy_(memory.view(self._dtype).view(target.shape))

    def _bytes(self) -> torch.Tensor:
        """Memory for the box in row-major order: a target's own if it has that layout, otherwise a new tensor's."""
        with self._lock:
            if self._memory is None:
                first = self._targets[0]
                own = self._own
                found = own if own is not None else torch.empty(first.shape, dtype=self._dtype, device=first.device)
                self._memory = found.detach().view(-1).view(_ELEMENTS[self.item])
            return self._memory


class GpuReceiver(Receiver):
    """The buffers of one fetch: host memory, and targets on devices.

    `receiving` must be entered before the first byte."""

    def __init__(self, hosts: HostBuffers, targets: Mapping[str, GpuTarget], reads: Sequence[ShardRead]) -> None:
        self._hosts = hosts
        self._targets = targets
        self._devices = list(dict.fromkeys(target.device for target in targets.values()))
        staged = [self._staged_bytes(chunk) for read in reads for chunk in read.chunks]
        largest = max([1, *staged, min(sum(staged), CHUNK_BYTES)])
        self._size = 1 << (largest - 1).bit_length()  # pinned memory is allocated in powers of two
        num_buffers = min(NUM_BUFFERS, max(2, STAGING_BYTES // self._size))
        self._pool = BufferPool(num_buffers, self._make_staging)

    @contextmanager
    def receiving(self) -> Iterator[GpuReceiver]:
        """When the block ends without an error, all bytes have arrived. After an error, later work on the devices is
        ordered after the copies that are still queued."""
        for device in self._devices:  # the memory to be written may still be in use
            device.wait(device.mark(side=False), side=True)
        try:
            yield self
        finally:
            for device in self._devices:
                device.wait(device.mark(side=True), side=False)
        self._pool.drain()

    def divide(self, read: ShardRead) -> Iterator[ShardRead]:
        """Split a read into reads that fit into a staging buffer."""
        for chunks in batches(read.chunks, self._staged_bytes, self._size):
            yield ShardRead(tuple(chunks))

    @contextmanager
    def receive(self, read: ShardRead) -> Iterator[tuple[ShardRead, HostBuffers]]:
        """The read and its buffers, with a staging buffer in place of the devices."""
        if not any(self._staged_bytes(chunk) for chunk in read.chunks):
            yield read, self._hosts
            return
        with self._borrowed() as (staging, devices):
            sent: list[tuple[Piece, int]] = []
            chunks = tuple(replace(chunk, pieces=self._stage(chunk.pieces, sent)) for chunk in read.chunks)
            yield ShardRead(chunks), ChainMap({_STAGED: staging.numpy().data}, self._hosts)  # type: ignore[arg-type]  # is only read
            for piece, at in sent:
                target = self._targets[piece.buffer]
                devices.add(target.device)
                source = staging[at : at + prod(piece.shape) * target.item]
                target.device.run(partial(target.put, piece, source))

    @contextmanager
    def _borrowed(self) -> Iterator[tuple[torch.Tensor, set[Device]]]:
        """A staging buffer, reused when the devices added to the set have done the work queued on them."""
        staging, devices, marks = self._pool.take(), set[Device](), list[Mark]()
        try:
            try:
                yield staging, devices
            finally:
                marks += [device.mark(side=True) for device in devices]
        finally:
            self._pool.give(staging, marks)

    def _make_staging(self) -> torch.Tensor:
        """Pinned memory, which torch caches, or pageable memory if pinning fails: copies then take longer."""
        try:
            return self._devices[0].pinned(self._size)
        except RuntimeError as error:
            logger.warning("cannot pin %d bytes, so the restore takes longer: %s", self._size, error)
            return torch.empty(self._size, dtype=torch.uint8, device="cpu")

    def _stage(self, pieces: Sequence[Piece], sent: list[tuple[Piece, int]]) -> tuple[Piece, ...]:
        """The pieces, with device pieces laid out in sequence in the staging buffer and appended to `sent`."""
        found = []
        for piece in pieces:
            if (target := self._targets.get(piece.buffer)) is None:
                found.append(piece)
                continue
            at = sent[-1][1] + self._piece_bytes(sent[-1][0]) if sent else 0
            sent.append((piece, at))
            steps = tuple(step * target.item for step in boxes.strides(piece.shape))
            found.append(replace(piece, buffer=_STAGED, to=at, to_strides=steps))
        return tuple(found)

    def _staged_bytes(self, chunk: ChunkRead) -> int:
        """Bytes that the chunk takes up in a staging buffer."""
        return sum(self._piece_bytes(piece) for piece in chunk.pieces)

    def _piece_bytes(self, piece: Piece) -> int:
        target = self._targets.get(piece.buffer)
        return 0 if target is None else -(-prod(piece.shape) * target.item // _ALIGNED) * _ALIGNED


def is_direct(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the tensor's memory holds elements of that dtype in row-major order."""
    return tensor.dtype == dtype and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
