"""Stage a snapshot that is larger than its slot: chunk by chunk, each as soon as the saver has made room for it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence

import torch

from ckpt.capture.leaves import Leaf, Leaves
from ckpt.saver.messages import SaveJob
from ckpt.saver.segment import Segment
from ckpt.saver.streaming import StreamWriter
from ckpt.snapshot.arena import ArenaSlot
from ckpt.snapshot.client import PendingJob, SaveClient
from ckpt.snapshot.guard import ChangeGuard, sample
from ckpt.snapshot.handle import SaveHandle
from ckpt.snapshot.overlap import Overlap, PendingCopy
from ckpt.snapshot.stage import SnapshotLayout, is_plain
from ckpt.snapshot.transfer import Transfer
from ckptstore.errors import SnapshotTorn
from ckptstore.format.shards import ChunkSpan, plan_chunks

_CLONED_BYTES = 32 << 20
"""What cannot wait is cloned, so that the rest can be copied beside training, if it is not more than this."""


def stream_snapshot(
    client: SaveClient,
    slot: ArenaSlot,
    leaves: Leaves,
    layout: SnapshotLayout,
    job: SaveJob,
    handle: SaveHandle,
    overlap: Overlap | None,
) -> None:
    """Copy the leaves through the slot, in step with the upload, and return when the saver has all of them; with
    overlap, return at once: then `optim.step()` waits for it.

    Raises the error of the save if it fails meanwhile, such as SaverDied; then nothing was taken.
    """
    stream_writer = StreamWriter(plan_chunks(layout.placed), slot.segment.num_bytes)
    waits = [_can_overlap(leaf, overlap) for leaf in leaves]
    if overlap is not None and _worthwhile(leaves, waits):
        pairs = list(zip(leaves, waits, strict=True))
        stream = _Stream(slot.segment, [leaf.tensor if wait else leaf.tensor.clone() for leaf, wait in pairs], layout)
        client.stream(job, handle, stream_writer)
        later = leaves.pick(i for i, wait in enumerate(waits) if wait)
        transfer = StreamTransfer(stream, client, stream_writer, job, handle, later)
        overlap.begin(
            client, PendingCopy(transfer, ChangeGuard(later, transfer.samples), PendingJob.of(job), handle, slot)
        )
        return
    stream = _Stream(slot.segment, leaves.tensors, layout)
    client.stream(job, handle, stream_writer)
    try:
        StreamTransfer(stream, client, stream_writer, job, handle, Leaves()).copy()
        client.submit(job, handle)
    except BaseException:
        client.cut(job.number)
        client.seen(handle)  # it is raised here, and not once more by the next save
        raise


def _can_overlap(leaf: Leaf, overlap: Overlap | None) -> bool:
    return overlap is not None and overlap.on and leaf.tensor.is_cpu and overlap.can_overlap(leaf)


def _worthwhile(leaves: Sequence[Leaf], waits: Sequence[bool]) -> bool:
    rest = sum(leaf.slice.bytes for leaf, wait in zip(leaves, waits, strict=True) if not wait)
    return any(waits) and rest <= _CLONED_BYTES


class StreamTransfer(Transfer):
    """A snapshot on its way through a slot. The saver cannot end it before the job is submitted."""

    def __init__(
        self,
        stream: _Stream,
        client: SaveClient,
        stream_writer: StreamWriter,
        job: SaveJob,
        handle: SaveHandle,
        later: Leaves,
    ) -> None:
        super().__init__()
        self.later, self.samples = later, list(map(sample, later.tensors))
        self._stream = stream
        self._client = client
        self._stream_writer = stream_writer
        self._job = job
        self._handle = handle
        self._torn = False

    def copy(self) -> None:
        """Copy everything, and tell the saver of all but the last chunk. Raises the error of a save that fails."""
        stream_writer, waited_s, began = self._stream_writer, 0.0, time.perf_counter()
        for number, (span, place) in enumerate(zip(stream_writer.spans, stream_writer.places, strict=True)):
            asked = time.perf_counter()
            stream_writer.wait(place)
            waited_s += time.perf_counter() - asked
            self._stream.copy(span, place.at)
            self._client.staged(self._job.number, min(number + 1, len(stream_writer.spans) - 1))
        stream_writer.check()
        wait_s = self._handle.timings.wait_s + waited_s
        self._handle._measure(wait_s=wait_s, stage_s=time.perf_counter() - began - waited_s)

    def copy_again(self) -> None:
        """Most of it has gone already."""
        self._torn = True

    def make_streams_wait(self) -> None:
        """Nothing is copied any more."""

    def finish(self) -> None:
        """Raises SnapshotTorn if it would have to be copied again."""
        if self._torn:
            raise SnapshotTorn(
                "the state changed while it passed through its slot, which cannot be done again",
                "Pass overlap=False to the Checkpointer if anything but optim.step() changes parameters between "
                "save_async and the next step; this process now goes on as if you had",
            )


class _Stream:
    """The raw stream of a snapshot, read from live tensors from front to back."""

    def __init__(self, segment: Segment, tensors: Sequence[torch.Tensor], layout: SnapshotLayout) -> None:
        self._arena = torch.frombuffer(segment.map, dtype=torch.uint8)
        pairs = zip(layout.placed, layout.order, strict=True)
        self._left = iter([(place, tensors[i]) for place, i in pairs if place.slice.bytes])
        self._at, self._source = 0, torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def copy(self, span: ChunkSpan, at: int) -> None:
        """Copy the next stretch to a place in the slot; it is there on return."""
        to = self._arena[at : at + span.bytes]
        for source in self._next(span.at, span.at + span.bytes):
            if is_plain(source):
                ctypes.memmove(to.data_ptr(), source.data_ptr(), source.nbytes)
            else:
                to[: source.nbytes].view(source.dtype).copy_(source)
            to = to[source.nbytes :]

    def _next(self, begin: int, end: int) -> Iterator[torch.Tensor]:
        """The elements from byte `begin` to `end` of the stream, tensor by tensor."""
        while begin < end:
            if begin == self._at + self._source.nbytes:
                place, tensor = next(self._left)
                self._at, self._source = place.at, tensor.detach().reshape(-1)  # a copy, if it is not contiguous
            size = self._source.element_size()
            low, high = begin - self._at, min(end - self._at, self._source.nbytes)
            yield self._source[low // size : high // size]
            begin = self._at + high
