"""Simulated time for encoding, and for a store that takes shards as fast as a test says, and keeps all but them."""

from __future__ import annotations

import threading
from typing import Any

from ckptstore.codecs.chunk_codecs import RAW, Buffer, Coding
from ckptstore.format.shards import EncodedChunk, encode_chunk
from ckptstore.stores import ObjectWriter, Store
from ckptstore.stores.wrapping import WrappedStore


class Clock(threading.local):
    """In place of the module time: each thread has its own, which passes only while it encodes or writes to a sink."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    thread_time = perf_counter

    def encode(self, raw: memoryview, coding: Coding, *arguments: Any) -> EncodedChunk:
        """In place of encode_chunk: ten seconds for a gigabyte, a tenth of one if raw."""
        self.now_s += len(raw) * (1e-10 if coding.codec == RAW else 1e-8)
        return encode_chunk(raw, coding, *arguments)


class Sink(WrappedStore):
    """Another store for documents; what is written to it from front to back is gone."""

    def __init__(self, store: Store, clock: Clock) -> None:
        super().__init__(store)
        self._clock = clock
        self.seconds_per_byte = 0.0

    def open_writer(self, key: str, size_hint: int = 0) -> ObjectWriter:
        """One that takes its time."""
        return _Writer(self._clock, self.seconds_per_byte)


class _Writer(ObjectWriter):
    def __init__(self, clock: Clock, seconds_per_byte: float) -> None:
        self._clock = clock
        self._seconds_per_byte = seconds_per_byte

    def write(self, data: Buffer) -> None:
        self._clock.now_s += memoryview(data).nbytes * self._seconds_per_byte

    def commit(self) -> None:
        pass

    def abort(self) -> None:
        pass
