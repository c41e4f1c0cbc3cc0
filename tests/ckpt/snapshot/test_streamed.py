"""Snapshots that are larger than their slot: the same bytes, in less memory; and deaths while they pass through it."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ckpt import Checkpointer
from ckpt.saver.streaming import LEAST_BYTES, StreamReader, StreamWriter, chunk_places
from ckpt.snapshot import writers
from ckptstore.errors import InvalidRequest, SaveFailed, SaverDied, SnapshotTorn, StoreUnavailable
from ckptstore.format.shards import ChunkSpan
from ckptstore.reading.source import StoreSource
from ckptstore.stores import open_store
from tests.ckpt.ddp import ROOT
from tests.support.stores import Faults, FaultyStore
from tests.support.trainers import is_alive, suspended
from tests.support.training import same_state
from tests.support.waiting import Lines, wait_until


class Large(nn.Module):
    """Twice the least slot: of several types, in memory that is not contiguous, and shared."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2_000_003))
        self.turned = nn.Parameter(torch.randn(1500, 1100).t())
        self.bf16 = nn.Parameter(torch.randn(5_000_001).to(torch.bfloat16))
        self.small = nn.ParameterList(torch.randn(n) for n in range(1, 40))
        self.tied = self.weight
        self.register_buffer("flags", torch.rand(3_000_000) > 0.5)
        self.register_buffer("nothing", torch.empty(0, 3))


def shards(store: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(store.glob("r/attempts/*/*.ckpt"))]


@pytest.fixture(scope="module")
def model() -> Large:
    return Large()


def slots(checkpointer: Checkpointer) -> list[int]:
    assert checkpointer._saves.client is not None
    return [segment.num_bytes for segment in checkpointer._saves.client._arena.segments.values()]


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=30).map(lambda sizes: [1000 * size for size in sizes]),
    st.integers(60_000, 200_000),
)
def test_no_chunk_is_copied_over_one_that_is_not_written(sizes: list[int], slot_bytes: int) -> None:
    spans = [ChunkSpan(0, size, "uint8") for size in sizes]
    found = chunk_places(spans, slot_bytes)
    for number, (span, place) in enumerate(zip(spans, found, strict=True)):
        assert 0 <= place.at <= slot_bytes - span.bytes
        assert place.after <= number
        for before in range(place.after, number):
            begin, end = found[before].at, found[before].at + spans[before].bytes
            assert end <= place.at or place.at + span.bytes <= begin


@pytest.mark.parametrize("writer", ["process", "thread"])
@pytest.mark.usefixtures("everywhere")
def test_a_streamed_save_stores_the_same_bytes_through_one_small_slot(
    writer: Literal["process", "thread"], model: Large, tmp_path: Path
) -> None:
    for name, limit in (("whole", None), ("streamed", LEAST_BYTES)):
        with Checkpointer(
            str(tmp_path / name),
            run="r",
            writer=writer,
            compress="fast",
            incremental=False,
            statistics=False,  # which name the attempt
            staging_bytes=limit,
        ) as checkpointer:
            for step in (1, 2):
                handle = checkpointer.save_async(model, None, step)
                assert handle.staged()
            assert handle.result(60).step == 2
            assert handle.timings.raw_bytes > 1.5 * LEAST_BYTES
            if limit is not None:
                assert slots(checkpointer) == [limit]
                other = Large()
                checkpointer.restore(other)
                assert same_state(dict(other.state_dict()), dict(model.state_dict()))
    assert shards(tmp_path / "streamed") == shards(tmp_path / "whole")


def test_a_state_that_fits_is_not_streamed(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), run="r", staging_bytes=LEAST_BYTES) as checkpointer:
        checkpointer.save(nn.Linear(8, 8), None, 1)
        assert max(slots(checkpointer)) < 1000


def test_too_small_a_slot_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="too little"):
        Checkpointer(str(tmp_path), run="r", staging_bytes=LEAST_BYTES - 1)


def test_the_death_of_the_saver_while_a_snapshot_passes_is_raised_and_healed(model: Large, tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), run="r", staging_bytes=LEAST_BYTES) as checkpointer:
        checkpointer.save(model, None, 1)
        saver = checkpointer.saver_pid
        assert saver is not None
        os.kill(saver, signal.SIGSTOP)

        def kill_it_once_it_has_the_job() -> None:
            wait_until(lambda: any(handle.step == 2 for handle in checkpointer._saves.pending()))
            os.kill(saver, signal.SIGKILL)

        killer = threading.Thread(target=kill_it_once_it_has_the_job)
        killer.start()
        with pytest.raises(SaverDied):
            checkpointer.save_async(model, None, 2)
        killer.join()
        assert checkpointer.save_async(model, None, 3).result(60).step == 3
        assert checkpointer.counters.failed == 1
    source = StoreSource(open_store(str(tmp_path)))
    assert [checkpoint.step for checkpoint in source.checkpoints("r")] == [3, 1]


def test_an_upload_that_fails_while_a_snapshot_passes_is_raised(
    model: Large, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults()
    monkeypatch.setattr(writers, "open_store", lambda *args, **kwargs: FaultyStore(open_store(*args, **kwargs), faults))
    with Checkpointer(
        str(tmp_path), run="r", writer="thread", incremental=False, staging_bytes=LEAST_BYTES
    ) as checkpointer:
        checkpointer.save(model, None, 1)
        faults.fail_at = len(faults.calls) + 2
        with pytest.raises(StoreUnavailable, match=r"write .* injected"):
            checkpointer.save_async(model, None, 2)
        assert checkpointer.save(model, None, 3).step == 3


def test_a_trainer_that_dies_while_a_snapshot_passes_leaves_nothing_that_counts(tmp_path: Path) -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-m", "tests.ckpt.snapshot.stream_train", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        lines = Lines(trainer.stdout)
        saver = int(lines.next())
        assert lines.next() == "streaming\n"
    finally:
        trainer.kill()
        trainer.wait()
        assert lines.next() == ""
        trainer.stdout.close()  # type: ignore[union-attr]
    os.kill(saver, signal.SIGCONT)
    wait_until(lambda: not is_alive(saver))
    assert [checkpoint.step for checkpoint in StoreSource(open_store(str(tmp_path))).checkpoints("r")] == [1]
    assert len(shards(tmp_path)) == 1


def test_a_stream_that_is_cut_ends_for_both_sides() -> None:
    spans = [ChunkSpan(10 * number, 10, "uint8") for number in range(3)]
    told: list[int] = []
    reader, stream_writer = StreamReader(memoryview(bytes(20)), spans, told.append), StreamWriter(spans, 20)
    reader.staged(1)
    chunks = reader.chunks(spans)
    assert next(chunks)[1] == spans[0]
    stream_writer.wait(stream_writer.places[0])
    reader.cut()
    with pytest.raises(SaveFailed, match="died or aborted"):
        next(chunks)
    stream_writer.fail(SaveFailed("gone"))
    with pytest.raises(SaveFailed, match="gone"):
        stream_writer.wait(stream_writer.places[0])


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=30), st.randoms(use_true_random=False))
def test_a_chunk_leaves_the_slot_when_it_is_written_or_not_to_be(
    chunks: list[tuple[int, bool]], chance: random.Random
) -> None:
    told = [0]
    reader = StreamReader(memoryview(bytes(10)), [], told.append)
    waiting: list[int] = []
    decided = 0
    for size, stored in chunks:
        while waiting and chance.random() < 0.5:
            waiting.pop(0)
            reader.written()
        waiting += [decided] * stored
        reader.decided(ChunkSpan(decided, size, "uint8"), stored)
        decided += size
        assert max(told) <= (waiting[0] if waiting else decided)
    for _ in waiting:
        reader.written()
    assert told == sorted(told)
    assert told[-1] == decided


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A state of one and a half slots."""
    model = nn.Sequential(nn.Linear(1400, 1400), nn.BatchNorm1d(1400))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 1400)).sum().backward()
    optimizer.step()


def test_with_overlap_only_the_next_step_waits_for_a_stream(tmp_path: Path) -> None:
    model, optimizer = trained()
    step(model, optimizer)
    with Checkpointer(str(tmp_path), run="r", staging_bytes=LEAST_BYTES) as checkpointer:
        checkpointer.prepare(model, optimizer)
        assert checkpointer.saver_pid is not None
        with suspended(checkpointer.saver_pid) as resume:
            expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            handle = checkpointer.save_async(model, optimizer, 1)
            assert not handle.staged()
            model(torch.randn(4, 1400)).sum().backward()  # moves the buffers
            waking = threading.Timer(0.3, resume)
            waking.start()
            optimizer.step()
            assert not waking.is_alive()
        assert handle.result(30).step == 1
        other, _ = trained()
        checkpointer.restore(other)
    assert handle.timings.raw_bytes > LEAST_BYTES
    assert same_state(dict(other.state_dict()), expected)


def test_a_state_that_changes_while_it_passes_fails_its_save_and_no_other(tmp_path: Path) -> None:
    model, optimizer = trained()
    step(model, optimizer)
    with Checkpointer(str(tmp_path), run="r", staging_bytes=LEAST_BYTES) as checkpointer:
        checkpointer.prepare(model, optimizer)
        assert checkpointer.saver_pid is not None
        with suspended(checkpointer.saver_pid):
            torn = checkpointer.save_async(model, optimizer, 1)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
        optimizer.step()
        with pytest.raises(SnapshotTorn):
            checkpointer.save_async(model, optimizer, 2)
        assert torn.done()
        assert checkpointer.save_async(model, optimizer, 3).result(30).step == 3
        assert checkpointer.counters.failed == 1
    assert [checkpoint.step for checkpoint in StoreSource(open_store(str(tmp_path))).checkpoints("r")] == [3]


def _swap_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter, 7.0)


def _convert(model: nn.Module) -> None:
    model.to(torch.bfloat16)


def _swap_and_back(model: nn.Module) -> None:
    for parameter in model.parameters():
        data, parameter.data = parameter.data, torch.full_like(parameter, 7.0)
        parameter.data = data


@pytest.mark.parametrize("change", [_swap_data, _convert, _swap_and_back])
def test_a_stream_holds_the_memory_of_the_call(change: Callable[[nn.Module], None], tmp_path: Path) -> None:
    model, optimizer = trained()
    step(model, optimizer)
    with Checkpointer(str(tmp_path), run="r", staging_bytes=LEAST_BYTES) as checkpointer:
        checkpointer.prepare(model, optimizer)
        assert checkpointer.saver_pid is not None
        with suspended(checkpointer.saver_pid):
            expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            handle = checkpointer.save_async(model, optimizer, 1)
            assert not handle.staged()
            change(model)
            gc.collect()
        assert handle.result(60).step == 1
        other, _ = trained()
        checkpointer.restore(other, checkpoint=1)
    assert same_state(dict(other.state_dict()), expected)


def test_a_freed_model_is_streamed_to_its_end(tmp_path: Path) -> None:
    model, optimizer = trained()
    step(model, optimizer)
    with Checkpointer(str(tmp_path), run="r", staging_bytes=LEAST_BYTES) as checkpointer:
        checkpointer.prepare(model, optimizer)
        assert checkpointer.saver_pid is not None
        with suspended(checkpointer.saver_pid):
            expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            handle = checkpointer.save_async(model, optimizer, 1)
            del model, optimizer
            gc.collect()
        handle.result(60)
        other, _ = trained()
        checkpointer.restore(other)
    assert same_state(dict(other.state_dict()), expected)
