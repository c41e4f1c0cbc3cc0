"""Codecs are chosen from what saves took: with a store whose speed changes, and saves that come sooner or later."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ckpt import Checkpointer
from ckpt.saver import measuring, upload
from ckpt.saver.measuring import MeasuredCodings
from ckpt.saver.messages import Done, Failed, Released, Report, SaveJob, Setup, SliceRow
from ckpt.saver.pipeline import SavePipeline
from ckptstore.clock import system_clock
from ckptstore.format.documents import SPARED
from ckptstore.format.shards import ChunkSpan
from ckptstore.names import new_ulid
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.stores import open_store
from tests.ckpt.saver.attempts import new_attempt
from tests.ckpt.saver.sinks import Clock, Sink

COUNT = 1 << 20
_RANDOM = np.random.default_rng(0)
WEIGHTS = (_RANDOM.standard_normal(COUNT) * 0.02).astype(np.float32)
NOISE = _RANDOM.integers(0, 256, 1 << 20, np.uint8)
STATES = [memoryview(WEIGHTS[::sign].tobytes() + NOISE[::sign].tobytes()) for sign in (1, -1)]
"""Two, so that all of it changes from save to save."""
SLOW, FAST = 30e-9, 0.0  # seconds a byte
A_FEW = 5


class Saver:
    """A saver of one state, whose saves are waited for."""

    def __init__(self, sink: Sink) -> None:
        setup = Setup(
            store=sink.url, options={}, run="r", rank=0, world_size=1, compress="auto",
            commit_timeout_s=20.0, daemon=None, token=None,
        )  # fmt: skip
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._source = StoreSource(sink)
        self.pipeline = SavePipeline(sink, setup, self._reports.put)
        self._steps = 0
        self._created_at = system_clock()
        self.reason, self.spares = "", False

    def save(self, interval_s: float = 0.0, lost_before_s: float | None = None) -> float:
        """The share of the weights that was not stored raw. interval_s: since the save before."""
        self._steps += 1
        self._created_at += interval_s
        rows = [
            SliceRow("model/w", "float32", (COUNT,), (0, COUNT), 0),
            SliceRow("noise", "uint8", (len(NOISE),), (0, len(NOISE)), WEIGHTS.nbytes),
        ]
        job = SaveJob(
            number=self._steps, slot=0, attempt=new_attempt(self._steps),
            created_at=self._created_at, slices=rows, aliases={}, trees={}, local={}, metrics={}, lease=None,
            lost_before_s=lost_before_s,
        )  # fmt: skip
        self.pipeline.submit(job, STATES[self._steps % 2])
        while not isinstance(report := self._reports.get(timeout=60.0), Done):
            assert not isinstance(report, Failed), report
            if isinstance(report, Released):
                self.reason, self.spares = report.coding, report.spares
        manifest = read_manifest(self._source, self._source.latest("r"))
        assert manifest.extensions.get(SPARED, self.reason) == self.reason
        assert (SPARED in manifest.extensions) == self.spares
        (shard,) = manifest.content.shards
        chunks = shard.chunks
        packed: int = sum(size for i, size in enumerate(chunks.raw.tolist()) if chunks.codec_of(i) != "raw")
        return packed / WEIGHTS.nbytes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measuring, "time", clock)
    monkeypatch.setattr(measuring, "encode_chunk", clock.encode)
    monkeypatch.setattr(upload, "time", clock)
    return clock


@pytest.fixture
def sink(clock: Clock) -> Sink:
    return Sink(open_store(f"memory://{new_ulid(system_clock())}"), clock)


@pytest.fixture
def saver(sink: Sink) -> Iterator[Saver]:
    saver = Saver(sink)
    yield saver
    saver.pipeline.close()


BUT_A_PROBE = 0.2


def test_it_follows_the_speed_of_the_store_both_ways(sink: Sink, saver: Saver) -> None:
    for seconds_per_byte, packed in ((FAST, 0.0), (SLOW, 1.0), (FAST, 0.0)):
        sink.seconds_per_byte = seconds_per_byte
        shares = [saver.save() for _ in range(A_FEW)]
        assert shares[-1] == pytest.approx(packed, abs=BUT_A_PROBE), shares
        if packed:
            assert "uint8 raw" in saver.reason, "noise, as was seen when it was tried"


def test_it_follows_the_interval_both_ways(saver: Saver) -> None:
    saver.save()
    assert "since the interval between saves is unknown" in saver.reason
    shares = [saver.save(interval_s=600.0) for _ in range(A_FEW)]
    assert shares[-1] == pytest.approx(1.0, abs=BUT_A_PROBE), shares
    assert "the smallest well inside" in saver.reason
    shares = [saver.save() for _ in range(A_FEW)]
    assert shares[-1] == pytest.approx(0.0, abs=BUT_A_PROBE), shares
    assert "the soonest durable, since none is well inside" in saver.reason


def test_what_training_loses_decides_as_well(saver: Saver) -> None:
    """A second of training for a few megabytes is never worth it."""
    saver.save()
    shares = [saver.save(interval_s=60.0, lost_before_s=lost_s) for lost_s in (0.0, 1.0, 1.0, 0.0)]
    assert shares[0] == pytest.approx(1.0, abs=BUT_A_PROBE)
    assert shares[1:] == [pytest.approx(0.0, abs=BUT_A_PROBE)] * 3
    assert "a smaller coding would cost training more than it gains" in saver.reason
    assert saver.spares


def test_the_trainer_reports_what_its_steps_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[SaveJob] = []
    submit = SavePipeline.submit

    def record(self: SavePipeline, job: SaveJob, raw: memoryview) -> None:
        jobs.append(job)
        submit(self, job, raw)

    monkeypatch.setattr(SavePipeline, "submit", record)
    model = torch.nn.Linear(8, 8)
    optim = torch.optim.AdamW(model.parameters())
    with Checkpointer("memory://lost", run="r", writer="thread") as checkpointer:
        checkpointer.prepare(model, optim)
        for step in range(1, 31):
            model(torch.ones(8)).sum().backward()
            optim.step()
            if step % 10 == 0:
                handle = checkpointer.save_async(model, optim, step)
                checkpointer.wait()
                assert "expected" in handle.timings.coding
    assert jobs[0].lost_before_s is None, "there was no save before"
    assert all(job.lost_before_s is not None and job.lost_before_s >= 0 for job in jobs[1:])


CHUNK = 256 << 10
SPANS = [ChunkSpan(at, CHUNK, "float32") for at in range(0, 2 << 20, CHUNK)]


def codecs_of_saves(codings: MeasuredCodings, upload_s: float, count: int) -> list[list[str]]:
    """The codecs of the chunks of saves that come back to back, for a store that takes this long."""
    raw, saves = WEIGHTS.data.cast("B"), []
    for _ in range(count):
        save = codings.begin(SPANS, 0.0)
        chunks = [save.encode(raw[span.at : span.at + span.bytes], span) for span in SPANS]
        stored = sum(chunk.stored for chunk in chunks)
        save.learn(stored, stored * upload_s)
        saves.append([chunk.codec for chunk in chunks])
    return saves


@pytest.mark.usefixtures("clock")
def test_a_codec_that_is_not_in_use_is_probed_with_one_chunk_of_every_few_saves() -> None:
    saves = codecs_of_saves(MeasuredCodings(1, SLOW), SLOW, 20)
    probes = [codecs.count("raw") for codecs in saves]
    assert set(probes) == {0, 1}
    assert 4 <= sum(probes) <= 5
    probed = [codecs.index("raw") for codecs in saves if "raw" in codecs]
    assert len(set(probed)) > 1, "another chunk each time"


@pytest.mark.usefixtures("clock")
def test_what_no_recent_save_stored_again_does_not_count() -> None:
    codings, whole = MeasuredCodings(1, SLOW), len(SPANS) * CHUNK
    expected = []
    for count in (len(SPANS), 1, 0, 1, 1, 1):
        save = codings.begin(SPANS, 0.0)
        expected.append(save.choice.durable_s)
        for span in SPANS[:count]:
            save.encode(WEIGHTS.data.cast("B")[: span.bytes], span)
        save.learn(whole, whole * SLOW)
    assert expected[1:5] == pytest.approx([expected[0]] * 4, rel=0.3)
    assert expected[5] == pytest.approx(expected[1] / len(SPANS), rel=0.3)


@pytest.mark.usefixtures("clock")
def test_probes_take_a_hundredth_of_the_time_at_most() -> None:
    # Raw saves take next to no time here, and encoding a single chunk takes longer than all the chunks of a save.
    saves = codecs_of_saves(MeasuredCodings(1, 1e-15), 1e-15, 20)
    assert sum(len(codecs) - codecs.count("raw") for codecs in saves) <= 2
