"""Streaming: a snapshot that is larger than its slot passes through it, one chunk at a time.

Both processes compute the same ring-buffer layout: each chunk follows the previous one, or starts at the beginning if
it does not fit. The trainer copies a chunk once the chunks that it overwrites are written, and announces it; the saver
encodes and writes the chunks in order. If the stream is cut because the trainer died or aborted, the save fails.
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
"""The minimum size of a slot: one chunk is copied while another one is encoded."""
_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """The place of a chunk in the slot."""

    at: int
    after: int
    """The number of chunks of the snapshot that must be written before this one may be copied."""


def chunk_places(spans: Sequence[ChunkSpan], slot_bytes: int) -> list[ChunkPlace]:
    """The place of each chunk; none may be larger than the slot. Pure."""
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
    """The saver's end of a stream.

    One thread iterates over the chunks, one announces staged chunks, and one reports written chunks.
    """

    def __init__(self, slot: memoryview, spans: Sequence[ChunkSpan], progress: Callable[[int], None]) -> None:
        """progress: called with the number of bytes of the stream that the slot need no longer hold."""
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
        """The first `count` chunks have been copied to the slot."""
        with self._changed:
            self._staged = count
            self._changed.notify_all()

    def __enter__(self) -> StreamReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()

    def cut(self) -> None:
        """End the stream: no more chunks will be copied."""
        with self._changed:
            self._cut = True
            self._changed.notify_all()

    def chunks(self, spans: Iterable[ChunkSpan]) -> Iterator[tuple[memoryview, ChunkSpan]]:
        """All chunks with their memory, each once it is copied. Raises SaveFailed if the stream is cut."""
        for number, (span, place) in enumerate(zip(spans, self._places, strict=True)):
            with self._changed:
                self._changed.wait_for(lambda number=number: self._cut or self._staged > number)  # type: ignore[misc]
                if self._staged <= number:
                    raise SaveFailed(
                        "the trainer died or aborted the save while its snapshot was streamed through the slot"
                    )
            yield self._slot[place.at : place.at + span.bytes], span

    def decided(self, span: ChunkSpan, stored: bool) -> None:
        """Report whether the last chunk of the iteration is stored, or referenced."""
        with self._leaving:
            if stored:
                self._to_write.append(self._decided)
            self._decided += span.bytes
            if not self._to_write:
                self._progress(self._decided)

    def written(self) -> None:
        """Report that the next stored chunk is written."""
        with self._leaving:
            self._to_write.popleft()
            self._progress(self._to_write[0] if self._to_write else self._decided)


class StreamWriter:
    """The trainer's end of a stream. One thread copies; others deliver the reports of the saver."""

    def __init__(self, spans: Sequence[ChunkSpan], slot_bytes: int) -> None:
        self.spans = spans
        self.places = chunk_places(spans, slot_bytes)
        self._ends = list(accumulate(span.bytes for span in spans))
        self._changed = threading.Condition()
        self._written = 0
        self._error: CkptError | None = None

    def written(self, raw_bytes: int) -> None:
        """The first `raw_bytes` bytes of the snapshot are written; their place in the slot is free."""
        with self._changed:
            self._written = bisect_right(self._ends, raw_bytes)
            self._changed.notify_all()

    def fail(self, error: CkptError) -> None:
        """End the stream: the save has failed."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait(self, place: ChunkPlace) -> None:
        """Return when a place is free. Raises the error of the save if it has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._written >= place.after)
        self.check()

    def check(self) -> None:
        """Raises the error of the save if it has failed."""
        if self._error is not None:
            raise self._error
