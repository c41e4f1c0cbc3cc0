"""Chooses how each save encodes its chunks: with a fixed policy, or from the measured costs of earlier saves.

What encoding costs training counts as well (pricing.py). Costs start from priors and are smoothed over saves. Codings
that are not in use are probed: from time to time one chunk of a save is encoded and stored with one of them. Readers
accept any mixture of codings.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from ckpt.saver.choosing import INTERVAL_SHARE, Choice, CodingCost, CostTable, choose
from ckpt.saver.pricing import Effort, Price
from ckptstore.codecs.chunk_codecs import POLICIES, RAW, Coding, CodingPolicy, codings
from ckptstore.codecs.extremes import BlockExtremes
from ckptstore.format.shards import ChunkSpan, EncodedChunk, encode_chunk

LOCAL_UPLOAD_S = 1 / 2e9
REMOTE_UPLOAD_S = 1 / 0.3e9
"""Expected upload time of a store in seconds per byte, until it has been measured."""

# Measured with trained weights and moments, and with integers, on one core next to a trainer (docs/decisions/0016).
_PRIORS = {
    Coding("raw"): CodingCost(1 / 10e9, 1.0),
    Coding("float-split/float32"): CodingCost(1 / 1.6e9, 0.835),
    Coding("float-split/bfloat16"): CodingCost(1 / 1.2e9, 0.67),
    Coding("float-split/float16"): CodingCost(1 / 1.4e9, 0.85),
    Coding("zstd"): CodingCost(1 / 0.8e9, 0.9),
}
_PRIOR_COST_OF_LEVELS = 10  # and no bytes saved, until a probe shows otherwise

_NEWEST_WEIGHS = 0.5
_LEAST_BYTES = 64 << 10  # fewer measure latency rather than throughput
_LEAST_S = 1e-9
_PROBE_SHARE = 0.01  # at most this fraction of the time of saves is spent on probing a coding
_PROBE_EVERY = 4
_LAST_SAVES = 4  # two of the same step must not make the next one look like one of few bytes
_PLAIN_SHARE = 0.1  # a save of which less is encoded says what plain ones cost


def codings_for(compress: str, url: str, threads: float, hashes_raw: bool = False) -> Codings:
    """The codings for a value of `compress`. url: of the store. threads: the number of cores that encode.

    hashes_raw: chunks get the digest of their bytes before encoding, too.
    """
    if compress != "auto":
        return FixedCodings(POLICIES[compress], hashes_raw)
    upload_s = LOCAL_UPLOAD_S if url.startswith(("file:", "memory:")) else REMOTE_UPLOAD_S
    return MeasuredCodings(threads, upload_s, hashes_raw)


class SaveCodings(Protocol):
    """How the chunks of one save are encoded."""

    reason: str
    """The choice and its reason, for the log."""
    spares: bool
    """A smaller coding would have cost training more than it gains."""

    def encode(self, raw: memoryview, span: ChunkSpan, extremes: BlockExtremes | None = None) -> EncodedChunk:
        """Encode one chunk; called in several threads. extremes: see codecs.encode."""

    def learn(self, stored_bytes: int, upload_s: float) -> None:
        """Record the upload; called once, after the last chunk. upload_s: without waiting for chunks."""


class Codings(Protocol):
    """Chooses for each save how its chunks are encoded."""

    def begin(self, spans: Sequence[ChunkSpan], created_at: float, lost_before_s: float | None = None) -> SaveCodings:
        """The codings of a save that was requested at this time.

        lost_before_s: what training lost to the save before it, in seconds; None: not known.
        """


class FixedCodings:
    """One policy for all saves."""

    spares = False

    def __init__(self, policy: CodingPolicy, hashes_raw: bool = False) -> None:
        self.reason = f"compress={policy.__name__!r}"
        self._policy = policy
        self._hashes_raw = hashes_raw

    def begin(self, spans: Sequence[ChunkSpan], created_at: float, lost_before_s: float | None = None) -> FixedCodings:
        return self

    def encode(self, raw: memoryview, span: ChunkSpan, extremes: BlockExtremes | None = None) -> EncodedChunk:
        return encode_chunk(raw, self._policy(span.dtype), extremes, self._hashes_raw)

    def learn(self, stored_bytes: int, upload_s: float) -> None:
        """Does nothing: the policy is fixed."""


class MeasuredCodings:
    """Chosen for each save from the costs of earlier saves, for training too, and their interval. For any thread."""

    def __init__(self, threads: float, upload_s: float, hashes_raw: bool = False) -> None:
        """threads: the number of cores that encode. upload_s: expected upload time in seconds per byte."""
        self._threads = threads
        self.hashes_raw = hashes_raw
        self._lock = threading.Lock()
        self._upload = _Smoothed(CodingCost(upload_s, 1.0))
        self._encoding: dict[tuple[str, Coding], _Smoothed] = {}
        self._measured_in: dict[tuple[str, Coding], int] = defaultdict(lambda: -_PROBE_EVERY)
        self._saves = 0
        self._changed: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_LAST_SAVES))
        """By element type, the fractions of bytes that had changed in the last saves."""
        self._last_at: float | None = None
        self._interval_s: float | None = None
        self._price = Price()
        self._effort: Effort | None = None
        """The effort of the last save, once it is uploaded."""

    def begin(self, spans: Sequence[ChunkSpan], created_at: float, lost_before_s: float | None = None) -> MeasuredSave:
        """The best choice for this save. One chunk may be encoded as a probe."""
        with self._lock:
            self._saves += 1
            if self._effort is not None:
                self._price.learn(self._effort, lost_before_s)
                self._effort = None
            interval_s = self._pass(created_at)
            raw_bytes: Counter[str] = Counter()
            for span in spans:
                raw_bytes[span.dtype] += span.bytes
            changing = {dtype: count * max(self._changed[dtype], default=1.0) for dtype, count in raw_bytes.items()}
            costs = self._costs(raw_bytes)
            price = self._price.per_second
            choice = choose(changing, costs, self._upload.cost.seconds, self._threads, interval_s, price)
            reason = _explain(choice, interval_s, price)
            return MeasuredSave(self, raw_bytes, choice, reason, self._probe(spans, costs, choice))

    def learn(
        self, raw_bytes: Mapping[str, int], samples: Iterable[EncodeSample], stored_bytes: int, upload_s: float
    ) -> None:
        """Update the costs from one save. raw_bytes: by element type, including unchanged chunks."""
        totals: dict[tuple[str, Coding], EncodeSample] = {}
        for sample in samples:
            key = sample.dtype, sample.coding
            totals[key] = totals[key].plus(sample) if key in totals else sample
        encoded = sum(total.raw for total in totals.values() if total.coding.codec != RAW)
        with self._lock:
            self._effort = Effort(
                raw_bytes=sum(raw_bytes.values()),
                wall_s=sum(total.seconds for total in totals.values()),
                core_s=sum(total.core_s for total in totals.values()),
                is_plain=encoded < _PLAIN_SHARE * sum(raw_bytes.values()),
            )
            if stored_bytes >= _LEAST_BYTES:
                self._upload.add(upload_s, stored_bytes, stored_bytes)
            for dtype, count in raw_bytes.items():
                changed = sum(total.raw for total in totals.values() if total.dtype == dtype)
                self._changed[dtype].append(changed / count)
            for key, total in totals.items():
                if total.raw >= _LEAST_BYTES:
                    self._measured_in[key] = self._saves
                    self._smoothed(*key).add(total.seconds, total.raw, total.stored)

    def _pass(self, now: float) -> float | None:
        """The smoothed interval between saves, never longer than the last one."""
        if self._last_at is not None:
            last = max(_LEAST_S, now - self._last_at)
            self._interval_s = min(last, _smooth(self._interval_s or last, last))
        self._last_at = now
        return self._interval_s

    def _costs(self, dtypes: Iterable[str]) -> CostTable:
        return {dtype: {coding: self._smoothed(dtype, coding).cost for coding in codings(dtype)} for dtype in dtypes}

    def _smoothed(self, dtype: str, coding: Coding) -> _Smoothed:
        return self._encoding.setdefault((dtype, coding), _Smoothed(_prior(coding)))

    def _probe(self, spans: Sequence[ChunkSpan], costs: CostTable, choice: Choice) -> dict[int, Coding]:
        """The chunk to encode as a probe, by its first byte, and its coding: the one measured longest ago."""
        time_s = max(choice.durable_s, INTERVAL_SHARE * (self._interval_s or 0.0))
        due: list[tuple[int, int, Coding]] = []
        for dtype, chosen in choice.codings.items():
            eligible = [span for span in spans if span.dtype == dtype and span.bytes >= _LEAST_BYTES]
            if not eligible:
                continue
            span = eligible[self._saves % len(eligible)]
            for coding in codings(dtype):
                age = self._saves - self._measured_in[dtype, coding]
                cost_s = span.bytes * costs[dtype][coding].seconds
                affordable = cost_s <= _PROBE_SHARE * age * time_s
                if coding != chosen and age >= _PROBE_EVERY and affordable:
                    due.append((age, span.at, coding))
        return {at: coding for _, at, coding in [max(due)]} if due else {}


class MeasuredSave:
    """The codings of one save, chosen by MeasuredCodings."""

    def __init__(
        self,
        codings: MeasuredCodings,
        raw_bytes: Mapping[str, int],
        choice: Choice,
        reason: str,
        probe: Mapping[int, Coding],
    ) -> None:
        self._codings = codings
        self._raw_bytes = raw_bytes
        self.choice = choice
        self._probe = probe
        self._samples: list[EncodeSample] = []
        self.reason, self.spares = reason, choice.spares

    def encode(self, raw: memoryview, span: ChunkSpan, extremes: BlockExtremes | None = None) -> EncodedChunk:
        coding = self._probe.get(span.at, self.choice.codings[span.dtype])
        # Wall time, not CPU time: the thread has a lower priority than the trainer, which slows it down.
        started, core_s = time.perf_counter(), time.thread_time()
        chunk = encode_chunk(raw, coding, extremes, self._codings.hashes_raw)
        wall_s, core_s = time.perf_counter() - started, time.thread_time() - core_s
        self._samples.append(EncodeSample(span.dtype, coding, wall_s, chunk.raw, chunk.stored, core_s))
        return chunk

    def learn(self, stored_bytes: int, upload_s: float) -> None:
        self._codings.learn(self._raw_bytes, self._samples, stored_bytes, upload_s)


class EncodeSample(NamedTuple):
    """The cost of encoding some chunks of one element type with one coding."""

    dtype: str
    coding: Coding
    seconds: float
    raw: int
    stored: int
    core_s: float
    """Processor time within `seconds`."""

    def plus(self, other: EncodeSample) -> EncodeSample:
        """The sum of both."""
        return EncodeSample(
            self.dtype, self.coding, self.seconds + other.seconds, self.raw + other.raw, self.stored + other.stored,
            self.core_s + other.core_s,
        )  # fmt: skip


class _Smoothed:
    """A cost smoothed over saves. The first measurement replaces the prior."""

    def __init__(self, prior: CodingCost) -> None:
        self.cost = prior
        self._measured = False

    def add(self, seconds: float, count: int, stored: int) -> None:
        """Add the cost of `count` bytes in one save."""
        new = CodingCost(max(seconds, _LEAST_S) / count, stored / count)
        old, self._measured = self.cost if self._measured else new, True
        self.cost = CodingCost(_smooth(old.seconds, new.seconds), _smooth(old.stored, new.stored))


def _smooth(old: float, new: float) -> float:
    """A geometric mean: a store that became ten times faster is detected as soon as one that became slower."""
    return math.exp((1 - _NEWEST_WEIGHS) * math.log(old) + _NEWEST_WEIGHS * math.log(new))


def _name(coding: Coding) -> str:
    return coding.codec if coding.level == 1 else f"{coding.codec} at level {coding.level}"


def _prior(coding: Coding) -> CodingCost:
    if coding in _PRIORS:
        return _PRIORS[coding]
    lowest = _PRIORS[Coding(coding.codec)]
    return lowest._replace(seconds=_PRIOR_COST_OF_LEVELS * lowest.seconds)


def _explain(choice: Choice, interval_s: float | None, price: float) -> str:
    chosen = ", ".join(f"{dtype} {_name(coding)}" for dtype, coding in choice.codings.items())
    times = f"{choice.durable_s:.3g} s expected (encode {choice.encode_s:.3g}, upload {choice.upload_s:.3g})"
    if choice.spares:
        lost = f"training loses {price:.2g} s for each second of encoding"
        return f"{chosen}: {times}; a smaller coding would cost training more than it gains: {lost}"
    if interval_s is None:
        return f"{chosen}: {times}, the soonest durable, since the interval between saves is unknown"
    inside = choice.durable_s <= INTERVAL_SHARE * interval_s
    why = "the smallest well inside" if inside else "the soonest durable, since none is well inside"
    return f"{chosen}: {times}, {why} the interval of {interval_s:.3g} s"
