"""Encode: a few threads compress and hash the chunks of snapshots, in order, within a byte budget.

Encoding runs ahead of the upload, until the budget is filled with encoded chunks that are not yet written. Encoding a
chunk runs in C, without the GIL.

The saver must not slow down the training step. Its threads have a lower priority than the trainer's (SCHED_BATCH and
niceness, lowest best-effort I/O priority). With a CPU budget, they sleep while the process has used more than it.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from ckptstore.codecs.chunk_codecs import CodingPolicy
from ckptstore.codecs.dtypes import Extremes
from ckptstore.format.planning import batches
from ckptstore.format.shards import ChunkSpan, EncodedChunk, encode_chunk

NICENESS = 5
_BURST_S = 1.0
"""Unused budget accumulates for at most this time."""
_SHORTEST_S, _LONGEST_S = 0.001, 1.0

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}
_IOPRIO_WHO_PROCESS = 1
_LOWEST_BEST_EFFORT = (2 << 13) | 7


class CpuThrottle:
    """Limits this process to a fraction of one core. wait_for_budget may be called from any thread."""

    def __init__(self, cpu_budget: float | None) -> None:
        """cpu_budget: fraction of one core, such as 0.5; None: no limit."""
        self._budget = cpu_budget
        self._lock = threading.Lock()
        self._at, self._used = time.monotonic(), time.process_time()
        self._left_s = 0.0

    def wait_for_budget(self) -> None:
        """Return when the process may use more CPU time; call it before each unit of work."""
        while (behind := self._behind()) > 0:
            time.sleep(min(max(behind, _SHORTEST_S), _LONGEST_S))  # the limit may be lifted

    def lift(self) -> None:
        """No limit from now on."""
        self._budget = None

    def _behind(self) -> float:
        """Seconds to sleep until CPU time is within the budget; negative if it is."""
        with self._lock:
            if self._budget is None:
                return -math.inf
            now, used = time.monotonic(), time.process_time()
            self._left_s += self._budget * (now - self._at) - (used - self._used)
            self._left_s = min(self._left_s, self._budget * _BURST_S)
            self._at, self._used = now, used
            return -self._left_s / self._budget


def lower_priority() -> None:
    """Lower the priority of this process and of threads that it starts from now on, as far as the system allows."""
    if hasattr(os, "SCHED_BATCH"):
        try:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        except OSError:
            pass  # niceness alone must do
    os.nice(NICENESS)
    number = _IOPRIO_SET.get(platform.machine())
    if sys.platform == "linux" and number is not None:
        ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, 0, _LOWEST_BEST_EFFORT)


THREADS = min(4, max(1, (os.cpu_count() or 2) - 1))
BUDGET_BYTES = 64 << 20
"""Maximum raw bytes of chunks that are being encoded, or encoded and not yet written. One chunk is always allowed."""
_GROUP_BYTES = 4 << 20
"""Small chunks are handed from thread to thread together: each time costs as much as hashing a megabyte."""


Encode = Callable[..., EncodedChunk]
"""Encodes the bytes of one chunk, given its span of the raw stream and perhaps Extremes to fill (codecs.encode);
called in several threads."""
ChunkStream = Iterable[tuple[memoryview, ChunkSpan]]
"""The bytes of the chunks to encode, in order, and their spans of the raw stream."""


def encode_by(policy: CodingPolicy, hashes_raw: bool = False, throttle: CpuThrottle | None = None) -> Encode:
    """Encode each chunk with the policy's coding for its element type.

    hashes_raw: chunks get the digest of their bytes before encoding, too. throttle: may let each chunk wait.
    """

    def encode(raw: memoryview, span: ChunkSpan, extremes: Extremes | None = None) -> EncodedChunk:
        if throttle is not None:
            throttle.wait_for_budget()
        return encode_chunk(raw, policy(span.dtype), extremes, hashes_raw)

    return encode


def encode_stream(chunks: ChunkStream, encode: Encode) -> Generator[EncodedChunk, None, None]:
    """The encoded chunks in order. `chunks` is consumed on the calling thread, while encoding runs ahead.

    Close it, also after an error of the consumer: that waits for chunks that are being encoded. The garbage collector
    would wait for them wherever it runs, such as in a thread that is about to begin.
    """

    def encode_all(group: ChunkStream) -> list[EncodedChunk]:
        return [encode(raw, span) for raw, span in group]

    with ThreadPoolExecutor(THREADS, thread_name_prefix="ckpt-encode") as pool:
        ahead: deque[tuple[Future[list[EncodedChunk]], int]] = deque()
        held = 0
        for group in batches(chunks, lambda chunk: chunk[1].bytes, _GROUP_BYTES):
            size = sum(span.bytes for _, span in group)
            while ahead and held + size > BUDGET_BYTES:
                future, done = ahead.popleft()
                yield from future.result()
                held -= done
            ahead.append((pool.submit(encode_all, group), size))
            held += size
        while ahead:
            yield from ahead.popleft()[0].result()
