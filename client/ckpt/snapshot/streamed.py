"""Stage a snapshot that is larger than its slot: chunk by chunk, each as soon as the saver has freed its place."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from ckpt.capture.arrays import HostArray
from ckpt.capture.leaves import Leaves
from ckpt.capture.reads import SmallReads
from ckpt.device import Patience, has_device
from ckpt.lazily import torch
from ckpt.saver.segment import Segment
from ckpt.saver.streaming import StreamWriter
from ckpt.snapshot.client import SaveClient
from ckpt.snapshot.guard import Guard, sample
from ckpt.snapshot.progress import EVERYONE, CopyProgress, Part
from ckpt.snapshot.request import Snapshot
from ckpt.snapshot.stage import SnapshotLayout, is_plain
from ckptstore.format.shards import ChunkSpan, Placed, plan_chunks

if TYPE_CHECKING:
    from ckpt.snapshot.overlap import Overlap

_NOTHING = cast("torch.Tensor", HostArray(np.empty(0, np.uint8), 1))
_CLONED_BYTES = 32 << 20
"""Leaves that cannot overlap are copied at the call if they are not more than this, so that the rest can be copied in
the background."""


def stream_snapshot(client: SaveClient, snapshot: Snapshot, overlap: Overlap | None) -> None:
    """Copy the leaves through the slot, at the pace of the upload, and return when the saver has all of them. With
    overlap, return at once; then `optim.step()` waits for the copy.

    Raises the error of the save if it fails meanwhile, such as SaverDied; then nothing was saved.
    """
    assert snapshot.slot is not None
    leaves, layout, segment = snapshot.request.captured.leaves, snapshot.request.layout, snapshot.slot.segment
    writer = StreamWriter(plan_chunks(layout.placed), segment.num_bytes)
    deferred = _deferred(leaves, overlap)
    if overlap is not None and _worthwhile(leaves, deferred):
        pairs = list(zip(leaves.tensors, deferred, strict=True))
        waiting = [i for i, waits in enumerate(deferred) if waits]
        reads = snapshot.request.captured.reads
        tensors = [tensor.detach() if waits else _clone(tensor, reads) for tensor, waits in pairs]
        reads.finish()
        stream = _Stream(segment, tensors, layout, {i: number for number, i in enumerate(waiting)})
        later = leaves.pick(waiting)
        storages = list(map(torch.Tensor.untyped_storage, later.tensors))
        guard = overlap.guard(later, list(map(sample, later.tensors)), storages)
        client.stream(snapshot, writer)
        from ckpt.snapshot.overlap import PendingCopy  # loads torch

        transfer = StreamTransfer(stream, client, snapshot, writer, storages)
        overlap.begin(client, PendingCopy(transfer, guard, snapshot))
        return
    stream = _Stream(segment, leaves.tensors, layout, {})
    client.stream(snapshot, writer)
    try:
        StreamTransfer(stream, client, snapshot, writer).copy()
        client.submit(snapshot)
    except BaseException:
        client.cut(snapshot.number)
        client.seen(snapshot.updates)  # it is raised here, so the next save must not raise it again
        raise


def _deferred(leaves: Leaves, overlap: Overlap | None) -> list[bool]:
    """Which leaves are copied later."""
    if overlap is None or not overlap.on:
        return [False] * len(leaves)
    pairs = zip(leaves.tensors, overlap.parts(leaves), strict=True)
    return [tensor.is_cpu and part is not None for tensor, part in pairs]


def _clone(tensor: torch.Tensor, reads: SmallReads) -> torch.Tensor:
    """Host memory that has the elements of a tensor after `reads.finish`.

    A clone on a GPU would be read by the copier thread, whose current stream does not wait for that of this thread.
    """
    return tensor.clone() if tensor.is_cpu and not has_device(tensor) else reads.read(tensor)


def _worthwhile(leaves: Leaves, deferred: Sequence[bool]) -> bool:
    rest = sum(piece.bytes for piece, later in zip(leaves.slices, deferred, strict=True) if not later)
    return any(deferred) and rest <= _CLONED_BYTES


class StreamTransfer:
    """The copy of a snapshot through its slot. The saver cannot finish the save before the snapshot is submitted."""

    on_devices = False
    frozen: Sequence[Placed] = ()
    """Frozen leaves are not tracked: most of the slot has been overwritten at the end of the copy."""

    def __init__(
        self,
        stream: _Stream,
        client: SaveClient,
        snapshot: Snapshot,
        writer: StreamWriter,
        storages: Sequence[torch.UntypedStorage] = (),
    ) -> None:
        """storages: those that are read after the call."""
        self.storages = storages
        self.parts: Mapping[Part, Sequence[int]] = {EVERYONE: range(len(storages))}
        """One part: a stream is copied from front to back."""
        self.progress = CopyProgress(self.parts)
        self._stream = stream
        self._client = client
        self._snapshot = snapshot
        self._writer = writer

    def copy(self, guard: Guard | None = None, patience: Patience | None = None) -> None:
        """Copy everything, and announce all but the last chunk to the saver. Raises the error of a failed save.

        guard: checks the leaves; one that has changed ends the copy.
        """
        writer, waited_s, started = self._writer, 0.0, time.perf_counter()
        for number, (span, place) in enumerate(zip(writer.spans, writer.places, strict=True)):
            wait_started = time.perf_counter()
            writer.wait(place)
            waited_s += time.perf_counter() - wait_started
            if not self._stream.copy(span, place.at, guard):
                return
            self._client.staged(self._snapshot.number, min(number + 1, len(writer.spans) - 1))
        writer.check()
        updates = self._snapshot.updates
        wait_s = updates.handle.timings.wait_s + waited_s
        updates.measure(wait_s=wait_s, stage_s=time.perf_counter() - started - waited_s)

    def held(self) -> Sequence[torch.UntypedStorage]:
        """The storages that are read after the call."""
        return self.storages

    def torn(self) -> list[str]:
        """Nothing is copied by devices."""
        return []

    def make_streams_wait(self, parts: Iterable[Part]) -> None:
        """Nothing to order: `copy` returns when everything is copied."""

    def finish(self, expired: Callable[[], bool] | None = None) -> bool:
        """Nothing to wait for: `copy` returns when everything is copied."""
        return True

    def release(self) -> None:
        """Release the last tensor; the stream is copied."""
        self.storages = ()
        self._stream.release()


class _Stream:
    """The raw stream of a snapshot, read from front to back, from tensors whose memory is held from the call on."""

    def __init__(
        self,
        segment: Segment,
        tensors: Sequence[torch.Tensor],
        layout: SnapshotLayout,
        guarded: Mapping[int, int],
    ) -> None:
        """guarded: the index in the guard, by the index of the tensor."""
        self._memory, self._address = segment.map, ctypes.addressof(segment.map)
        pairs = zip(layout.placed, layout.order, strict=True)
        self._left = iter([(place, tensors[i], guarded.get(i)) for place, i in pairs if place.slice.bytes])
        self._at, self._source = 0, _NOTHING
        self._guarded: int | None = None

    def copy(self, span: ChunkSpan, at: int, guard: Guard | None) -> bool:
        """Copy the next chunk to byte `at` of the slot; the slot holds it on return.

        False if a tensor of it has changed since it was captured; then the stream is useless.
        """
        begin, end = span.at, span.at + span.bytes
        while begin < end:
            if not self._open(begin, guard):
                return False
            size = self._source.element_size()
            low, high = begin - self._at, min(end - self._at, self._source.nbytes)
            source = self._source[low // size : high // size]
            if is_plain(source):
                ctypes.memmove(self._address + at, source.data_ptr(), source.nbytes)
            else:
                to = torch.frombuffer(self._memory, dtype=torch.uint8, count=source.nbytes, offset=at)
                to.view(source.dtype).copy_(source)
            if not self._copied(guard, self._address + at, source.nbytes):
                return False
            at, begin = at + source.nbytes, self._at + high
        return True

    def release(self) -> None:
        """Release tensor references."""
        self._left, self._source = iter(()), _NOTHING

    def _open(self, begin: int, guard: Guard | None) -> bool:
        """Continue with the tensor at byte `begin` of the stream. False if its memory was replaced; it may be freed."""
        if begin >= self._at + self._source.nbytes:
            place, tensor, self._guarded = next(self._left)
            if self._moved(guard):
                return False
            self._at, self._source = place.at, tensor.detach().reshape(-1)  # a copy, if it is not contiguous
        return not self._moved(guard)

    def _moved(self, guard: Guard | None) -> bool:
        return guard is not None and self._guarded is not None and guard.moved(self._guarded)

    def _copied(self, guard: Guard | None, address: int, num_bytes: int) -> bool:
        return guard is None or self._guarded is None or guard.copied(self._guarded, address, num_bytes)
