"""Encode: chunks of a snapshot, compressed and hashed by a few threads, in order, under a byte budget. No torch."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ckptstore.codings import Policy
from ckptstore.shards import ChunkSpan, EncodedChunk, encode_chunk

THREADS = min(4, max(1, (os.cpu_count() or 2) - 1))
_AHEAD = 2  # chunks encoded and waiting, beyond one per thread

Encode = Callable[[memoryview, ChunkSpan], EncodedChunk]
"""Encodes one chunk of a raw stream; called in several threads."""


def encode_by(policy: Policy) -> Encode:
    """Every chunk as its element type asks for."""
    return lambda raw, span: encode_chunk(raw, span, policy(span.dtype))


def encode_chunks(raw: memoryview, spans: Sequence[ChunkSpan], encode: Encode) -> Iterator[EncodedChunk]:
    """The chunks in order. At most THREADS + 2 of them are in memory at a time."""
    return encode_stream(((raw, span) for span in spans), encode)


def encode_stream(chunks: Iterable[tuple[memoryview, ChunkSpan]], encode: Encode) -> Iterator[EncodedChunk]:
    """The same for chunks that each lie in memory of their own, which is asked for as encoding goes on."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="ckpt-encode") as pool:
        waiting: deque[Future[EncodedChunk]] = deque()
        for raw, span in chunks:
            if len(waiting) >= THREADS + _AHEAD:
                yield waiting.popleft().result()
            waiting.append(pool.submit(encode, raw, span))
        while waiting:
            yield waiting.popleft().result()
