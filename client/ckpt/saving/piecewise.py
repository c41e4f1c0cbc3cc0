"""Stage a snapshot that is larger than its slot: chunk by chunk, each as soon as the saver has made room for it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence

import torch

from ckpt.capture.leaves import Leaf
from ckpt.saving.arena import ArenaSlot
from ckpt.saving.client import SaveClient
from ckpt.saving.handle import SaveHandle
from ckpt.saving.messages import Job
from ckpt.saving.segment import Segment
from ckpt.saving.stage import Layout, is_plain
from ckpt.saving.streaming import Outlet
from ckptstore.shards import ChunkSpan, plan_chunks


def stream_snapshot(
    client: SaveClient, slot: ArenaSlot, leaves: Sequence[Leaf], layout: Layout, job: Job, handle: SaveHandle
) -> None:
    """Copy the leaves through the slot, in step with the upload; return when the saver has all of them.

    Raises the error of the save if it fails meanwhile, such as SaverDied; then nothing was taken.
    """
    outlet = Outlet(plan_chunks(layout.placed), slot.segment.num_bytes)
    stream = _Stream(slot.segment, leaves, layout)
    client.stream(job, handle, outlet)
    waited_s, began = 0.0, time.perf_counter()
    try:
        for number, (span, place) in enumerate(zip(outlet.spans, outlet.places, strict=True)):
            asked = time.perf_counter()
            outlet.wait(place)
            waited_s += time.perf_counter() - asked
            stream.copy(span, place.at)
            client.staged(job.number, number + 1)
        outlet.check()
    except BaseException:
        client.cut(job.number)
        client.seen(handle)  # it is raised here, and not once more by the next save
        raise
    handle._hand_over()
    handle._measure(wait_s=handle.timings.wait_s + waited_s, stage_s=time.perf_counter() - began - waited_s)


class _Stream:
    """The raw stream of a snapshot, read from live tensors from front to back."""

    def __init__(self, segment: Segment, leaves: Sequence[Leaf], layout: Layout) -> None:
        self._arena = torch.frombuffer(segment.map, dtype=torch.uint8)
        pairs = zip(layout.placed, layout.order, strict=True)
        self._left = iter([(place, leaves[i].tensor) for place, i in pairs if place.slice.bytes])
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
