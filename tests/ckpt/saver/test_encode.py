from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from ckpt.saver import encode
from ckpt.saver.encode import BUDGET_BYTES, CpuThrottle, encode_stream
from ckptstore.format.shards import ChunkSpan, EncodedChunk

SIZE = BUDGET_BYTES // 3


class Counted:
    """Chunks of SIZE bytes, and which of them were encoded so far."""

    def __init__(self) -> None:
        self.encoded: list[int] = []

    def chunks(self, *numbers: int) -> Iterator[tuple[memoryview, ChunkSpan]]:
        for number in numbers:
            yield memoryview(bytes([number])), ChunkSpan(0, SIZE, "uint8")

    def encode(self, raw: memoryview, span: ChunkSpan) -> EncodedChunk:
        self.encoded.append(raw[0])
        return EncodedChunk(raw, span.bytes, 1, "raw", "")


def test_a_chunk_larger_than_the_budget_is_encoded_alone() -> None:
    work = Counted()
    large = ((memoryview(bytes([number])), ChunkSpan(0, 9 * SIZE, "uint8")) for number in (1, 2))
    with closing(encode_stream(large, work.encode)) as encoding:
        assert next(encoding).data[0] == 1
        assert work.encoded == [1]
        assert [chunk.data[0] for chunk in encoding] == [2]


def test_errors_of_a_chunk_or_of_its_source_reach_the_consumer() -> None:
    work = Counted()

    def torn() -> Iterator[tuple[memoryview, ChunkSpan]]:
        yield from work.chunks(1)
        raise ValueError("the trainer is gone")

    def fail(raw: memoryview, span: ChunkSpan) -> EncodedChunk:
        raise ZeroDivisionError

    with pytest.raises(ValueError, match="gone"):
        list(encode_stream(torn(), work.encode))
    with pytest.raises(ZeroDivisionError):
        list(encode_stream(work.chunks(1, 2, 3, 4, 5), fail))
    assert len(list(encode_stream(work.chunks(1, 2, 3, 4, 5), work.encode))) == 5


def test_chunks_in_memory_of_their_own_are_asked_for_as_the_budget_allows() -> None:
    asked, thread = 0, threading.current_thread()

    def chunks() -> Iterator[tuple[memoryview, ChunkSpan]]:
        nonlocal asked
        for number in range(20):
            assert threading.current_thread() is thread
            asked += 1
            yield memoryview(bytes([number])), ChunkSpan(0, BUDGET_BYTES // 4, "uint8")

    work = Counted()
    for number, chunk in enumerate(encode_stream(chunks(), work.encode)):
        assert chunk.data[0] == number
        assert asked <= number + 5


class Machine:
    def __init__(self) -> None:
        self.now = 0.0
        self.used = 0.0

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.used += seconds

    # Stands for the module time.

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.used


def test_a_cpu_budget_is_kept_over_about_a_second_and_not_saved_up_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr(encode, "time", machine)
    pace = CpuThrottle(0.25)
    for _ in range(100):
        pace.wait_for_budget()
        machine.work(0.01)
        assert machine.used <= 0.25 * machine.now + 0.011
    assert machine.now == pytest.approx(4, rel=0.02)
    machine.now += 100
    before = machine.now
    for _ in range(100):
        pace.wait_for_budget()
        machine.work(0.01)
    assert machine.now - before == pytest.approx(3, rel=0.03)


def test_without_a_budget_no_thread_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "time", machine := Machine())
    monkeypatch.setattr(machine, "sleep", lambda _: pytest.fail("slept"))
    pace = CpuThrottle(None)
    for _ in range(1000):
        pace.wait_for_budget()
