"""Streaming: a snapshot that is larger than its slot passes through it, a chunk at a time. No torch.

Trainer and saver compute alike where each chunk lies in the slot: behind the one before, or at the beginning when it
does not fit any more. The trainer copies a chunk when those that lay there before are written, and says so; the saver
encodes and writes them in order. A stream that is cut, because the trainer died or gave up, is a save that failed.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ckptstore.errors import CkptError, SaveFailed
from ckptstore.format.shards import CHUNK_BYTES, ChunkSpan

LEAST_BYTES = 2 * CHUNK_BYTES
"""Of a slot: one chunk is copied while another one is encoded."""
_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Where in the slot a chunk lies."""

    at: int
    after: int
    """So many chunks of the snapshot must have been written before this one may be copied."""


def chunk_places(spans: Sequence[ChunkSpan], slot_bytes: int) -> list[ChunkPlace]:
    """The place of each chunk, none of which is larger than the slot. Pure."""
    found: list[ChunkPlace] = []
    at = 0
    for number, span in enumerate(spans):
        if at + span.bytes > slot_bytes:
            at = 0
        after = 0
        for before in range(number - 1, -1, -1):
            begin = found[before].at
            if begin < at + span.bytes and at < begin + spans[before].bytes:
                after = before + 1
                break
        found.append(ChunkPlace(at, after))
        at = -(-(at + span.bytes) // _ALIGNMENT) * _ALIGNMENT
    return found


class StreamReader:
    """A stream, seen by the saver. One thread takes chunks, one tells how many there are, one which are written."""

    def __init__(self, slot: memoryview, spans: Sequence[ChunkSpan], progress: Callable[[int], None]) -> None:
        """progress: told how many bytes of the stream need not stay in the slot."""
        self._slot = slot
        self._progress = progress
        self._places = chunk_places(spans, len(slot))
        self._changed = threading.Condition()
        self._staged = 0
        self._cut = False
        self._leaving = threading.Lock()
        self._decided = 0
        self._to_write: deque[int] = deque()

    def staged(self, count: int) -> None:
        """So many chunks are copied."""
        with self._changed:
            self._staged = count
            self._changed.notify_all()

    def __enter__(self) -> StreamReader:
        return self

    def __exit__(self, *_: object) -> None:
        """Nobody takes any more chunks."""
        self.cut()

    def cut(self) -> None:
        """No more chunks will come."""
        with self._changed:
            self._cut = True
            self._changed.notify_all()

    def chunks(self, spans: Iterable[ChunkSpan]) -> Iterator[tuple[memoryview, ChunkSpan]]:
        """All chunks with their memory, each when it is there. Raises SaveFailed when the stream is cut."""
        for number, (span, place) in enumerate(zip(spans, self._places, strict=True)):
            with self._changed:
                self._changed.wait_for(lambda number=number: self._cut or self._staged > number)  # type: ignore[misc]
                if self._staged <= number:
                    raise SaveFailed("the trainer died or gave up while its snapshot passed through the slot")
            yield self._slot[place.at : place.at + span.bytes], span

    def decided(self, span: ChunkSpan, stored: bool) -> None:
        """Whether the chunk that was taken last is written, or left out."""
        with self._leaving:
            if stored:
                self._to_write.append(self._decided)
            self._decided += span.bytes
            if not self._to_write:
                self._progress(self._decided)

    def written(self) -> None:
        """The next one of those to be written is."""
        with self._leaving:
            self._to_write.popleft()
            self._progress(self._to_write[0] if self._to_write else self._decided)


class StreamWriter:
    """A stream, seen by the trainer. One thread copies, others hear what the saver says."""

    def __init__(self, spans: Sequence[ChunkSpan], slot_bytes: int) -> None:
        self.spans = spans
        self.places = chunk_places(spans, slot_bytes)
        self._ends = list(accumulate(span.bytes for span in spans))
        self._changed = threading.Condition()
        self._written = 0
        self._error: CkptError | None = None

    def written(self, raw_bytes: int) -> None:
        """So many bytes of the snapshot are written: their place in the slot is free."""
        with self._changed:
            self._written = bisect_right(self._ends, raw_bytes)
            self._changed.notify_all()

    def fail(self, error: CkptError) -> None:
        """Nobody takes any more."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait(self, place: ChunkPlace) -> None:
        """Return when there is room for a chunk. Raises the error of a save that has failed by now."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._written >= place.after)
        self.check()

    def check(self) -> None:
        """Raises the error of a save that has failed by now."""
        if self._error is not None:
            raise self._error
