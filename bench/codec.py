"""How fast one core encodes and decodes trained weights and moments, compared with other libraries.

All libraries get the same chunks, of our chunk size, in turns, with one thread. Speed is per second of processor
time, which a save takes from training. Decoded bytes are compared with the raw ones.

The cost of statistics is a few per cent, less than the spread of single turns on a busy machine. So each chunk is
encoded with and without them, one right after the other, hundreds of times. The ratio is that of the median difference,
over the faster half of these pairs; all statistics are counted, those that are evaluated in batches included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import zstandard

from bench.kinds import Kind, kinds
from bench.measuring import in_turns, seconds
from bench.peers import open_codecs
from bench.peers.peer import Codec
from bench.report import Goal, Report
from bench.state import trained, wanted_bytes
from ckpt.saver.statistics import chunk_extremes, chunk_table
from ckptstore.codecs.chunk_codecs import decode, encode, fast, smallest
from ckptstore.codecs.dtypes import ITEM_BYTES
from ckptstore.format.shards import CHUNK_BYTES

REPETITIONS = 7
PAIRS = 150
MOST_BYTES = 64 << 20
GOAL = 1.5
VS = "zipnn"
OURS = "ours, fast"
SURVEYED = "ours, fast, statistics"
STATISTICS_GOAL = 1.05


class Ours:
    """Our codec, at one of its settings."""

    def __init__(self, level: int) -> None:
        self._level = level
        self._into = memoryview(np.ones(CHUNK_BYTES, np.uint8).data)
        self._raw_bytes = CHUNK_BYTES

    def encode(self, raw: memoryview | bytearray, dtype: str) -> bytes | bytearray | memoryview:
        """One chunk."""
        self._raw_bytes = len(raw)
        return encode(fast(dtype).codec, memoryview(raw), self._level)[1]

    def decode(self, stored: bytes, dtype: str) -> memoryview:
        """Decode into the same memory each time, as a restore decodes into live tensors."""
        into = self._into[: self._raw_bytes]
        decode(fast(dtype).codec, memoryview(stored), into)
        return into


class OursWithStatistics(Ours):
    """Our codec, and the statistics that a save takes of each chunk."""

    def encode(self, raw: memoryview | bytearray, dtype: str) -> bytes | bytearray | memoryview:
        """One chunk of one slice."""
        given, sizes = memoryview(raw), (len(raw) // ITEM_BYTES[dtype],)
        extremes = chunk_extremes(dtype, sizes)
        encoded = encode(fast(dtype).codec, given, self._level, extremes)[1]
        self._raw_bytes = len(raw)
        chunk_table(dtype, given, sizes, extremes)
        return encoded


class Zstd:
    """Plain zstd."""

    def encode(self, raw: memoryview | bytearray, dtype: str) -> bytes:
        """Encode at the level that `compress="fast"` uses for types other than floating point."""
        return zstandard.ZstdCompressor(level=1).compress(raw)

    def decode(self, stored: bytes, dtype: str) -> bytes:
        """One frame."""
        return zstandard.ZstdDecompressor().decompress(stored)


class Turn(NamedTuple):
    """One repetition of one contestant on one kind."""

    encode_s: float
    decode_s: float
    stored: int


def measure(quick: bool) -> Report:
    """Encode and decode all kinds by all codecs."""
    torch.set_num_threads(1)
    state = trained("fp32", wanted_bytes(quick))
    peers, problems = open_codecs()
    level = smallest("float32").level
    own = {OURS: Ours(1), SURVEYED: OursWithStatistics(1), "ours, max": Ours(level), "zstd -1": Zstd()}
    codecs: dict[str, Codec] = {**own, **peers}  # type: ignore[dict-item]
    rows: list[tuple[str, ...]] = []
    sums: dict[tuple[str, str], list[float]] = {}
    for kind in kinds(state, MOST_BYTES // 4 if quick else MOST_BYTES):
        chunks = chunks_of(kind)
        total = sum(map(len, chunks))
        contestants: Mapping[str, Callable[[], Turn]] = {
            name: partial(_turn, codec, kind.dtype, chunks) for name, codec in codecs.items()
        }
        results, failed = in_turns(contestants, REPETITIONS)
        problems |= failed
        for name, turns in results.items():
            best = Turn(*(float(np.median(column)) for column in zip(*turns, strict=True)))  # type: ignore[arg-type]
            spent = sums.setdefault((name, kind.dtype), [0.0, 0.0])
            spent[0] += best.encode_s
            spent[1] += best.decode_s
            speeds = (f"{total / time_s / 1e9:.2f}" for time_s in (best.encode_s, best.decode_s))
            rows.append((kind.dtype, kind.name, name, f"{best.stored / total:.4f}", *speeds))
    goals = [
        Goal(f"{what} {dtype}", VS, _ratio(sums, dtype, at), GOAL, "at least")
        for dtype in ("float32", "bfloat16")
        for at, what in enumerate(("encode", "decode"))
    ]
    costs = _costs_of_statistics(kinds(state, CHUNK_BYTES), PAIRS if quick else 4 * PAIRS)
    goals += [
        Goal(f"statistics {dtype}", OURS, costs[dtype], STATISTICS_GOAL, "at most") for dtype in ("float32", "bfloat16")
    ]
    return Report(
        bench="codec",
        what=f"chunks of {CHUNK_BYTES >> 20} MiB of a trained state, per core-second, median of {REPETITIONS}",
        columns=("type", "of", "codec", "stored / raw", "encode GB/s", "decode GB/s"),
        rows=rows,
        goals=goals,
        problems=problems,
        state_bytes=state.num_bytes,
        facts={
            "float16 encode": _ratio(sums, "float16", 0),
            "float16 decode": _ratio(sums, "float16", 1),
            "two threads": _two_threads(chunks_of(kinds(state, MOST_BYTES)[0])),
        },
    )


def _costs_of_statistics(found: list[Kind], pairs: int) -> dict[str, float]:
    """Time to encode with statistics over that without, by element type: all kinds of a type together."""
    sums: dict[str, list[float]] = {}
    for kind in found:
        (chunk,) = chunks_of(kind)[:1]
        alone, surveyed = Ours(1), OursWithStatistics(1)
        both = {
            name: partial(_processor_s, codec, chunk, kind.dtype)
            for name, codec in ((OURS, alone), (SURVEYED, surveyed))
        }
        results, _ = in_turns(both, pairs)
        without, with_them = (np.array(results[name]) for name in (OURS, SURVEYED))
        quiet = without + with_them <= np.median(without + with_them)
        total = sums.setdefault(kind.dtype, [0.0, 0.0])
        total[0] += float(np.median((with_them - without)[quiet]))
        total[1] += float(np.median(without[quiet]))
    return {dtype: 1 + more / alone for dtype, (more, alone) in sums.items()}


def _processor_s(codec: Ours, chunk: memoryview, dtype: str) -> float:
    began = time.thread_time()
    codec.encode(chunk, dtype)
    return time.thread_time() - began


def chunks_of(kind: Kind) -> list[memoryview]:
    """Cut as large shards are; an incomplete last chunk is left out."""
    size = min(CHUNK_BYTES, len(kind.raw))
    return [kind.raw[at : at + size] for at in range(0, len(kind.raw) - size + 1, size)]


def _turn(codec: Codec, dtype: str, chunks: list[memoryview]) -> Turn:
    copies = [bytearray(chunk) for chunk in chunks]  # one codec overwrites its input
    began = time.process_time()
    stored = [codec.encode(copy, dtype) for copy in copies]
    encoded = time.process_time()
    for one in stored:
        raw = codec.decode(one, dtype)
    decode_s = time.process_time() - encoded
    if bytes(raw) != bytes(chunks[-1]):
        raise ValueError("the decoded bytes differ from the raw ones")
    return Turn(encoded - began, decode_s, sum(map(len, stored)))


def _ratio(sums: Mapping[tuple[str, str], list[float]], dtype: str, at: int) -> float:
    """Speed of ours over that of the peer."""
    theirs, ours = sums.get((VS, dtype)), sums[OURS, dtype]
    return theirs[at] / ours[at] if theirs is not None else float("nan")


def _two_threads(chunks: list[memoryview]) -> float:
    """Wall-clock speed of two threads over one: near 2 if they do not block each other."""
    ours = Ours(1)

    def work() -> None:
        for chunk in chunks:
            ours.encode(chunk, "float32")

    def both() -> None:
        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(work) for _ in range(2)]:
                future.result()

    results, _ = in_turns({"one": partial(seconds, work), "two": partial(seconds, both)})
    one, two = (statistics.median(results[name]) for name in ("one", "two"))
    return 2 * one / two
