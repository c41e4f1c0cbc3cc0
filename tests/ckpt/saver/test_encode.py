from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from ckpt.saver import encode
from ckpt.saver.encode import AHEAD, BUDGET_BYTES, CpuThrottle, Encoder, _groups, encode_stream
from ckptstore.format.shards import ChunkSpan, EncodedChunk
from tests.support.waiting import wait_until

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


@pytest.fixture
def encoder() -> Iterator[Encoder]:
    encoder = Encoder(CpuThrottle(None))
    yield encoder
    encoder.close()


def taken(chunks: Iterator[EncodedChunk], count: int) -> list[int]:
    return [next(chunks).data[0] for _ in range(count)]


def test_encoding_runs_into_the_next_snapshot_as_far_as_one_budget_allows(encoder: Encoder) -> None:
    work = Counted()
    with (
        closing(encoder.begin(work.chunks(1, 2), work.encode)) as first,
        closing(encoder.begin(work.chunks(3, 4, 5), work.encode)) as second,
    ):
        wait_until(lambda: sorted(work.encoded) == [1, 2, 3])
        chunks = iter(first)
        assert taken(chunks, 1) == [1]
        assert 4 not in work.encoded  # what was taken counts until the next one is asked for
        assert taken(chunks, 1) == [2]
        wait_until(lambda: 4 in work.encoded)
        assert (list(chunks), [chunk.data[0] for chunk in second]) == ([], [3, 4, 5])


def test_a_chunk_larger_than_the_budget_is_encoded_alone(encoder: Encoder) -> None:
    work = Counted()
    large = ((memoryview(bytes([number])), ChunkSpan(0, 9 * SIZE, "uint8")) for number in (1, 2))
    with closing(encoder.begin(large, work.encode)) as encoding:
        wait_until(lambda: work.encoded == [1])
        assert [chunk.data[0] for chunk in encoding] == [1, 2]


def test_a_snapshot_that_is_given_up_makes_room_and_is_not_read_any_more(encoder: Encoder) -> None:
    work = Counted()
    first = encoder.begin(work.chunks(*range(1, 9)), work.encode)
    wait_until(lambda: len(work.encoded) == 3)
    second = encoder.begin(work.chunks(11, 12), work.encode)
    first.close()
    given_up = list(work.encoded)
    with closing(second):
        assert [chunk.data[0] for chunk in second] == [11, 12]
    assert [number for number in work.encoded if number < 11] == [number for number in given_up if number < 11]
    assert max(number for number in work.encoded if number < 11) < 8


def test_a_chunk_is_given_back_by_a_consumer_that_stops_early(encoder: Encoder) -> None:
    """As an error of the store does, which keeps the iteration alive for as long as the error is kept."""
    work, kept = Counted(), []
    for number in range(4):
        with closing(encoder.begin(work.chunks(number, 9), work.encode)) as encoding:
            kept.append(iter(encoding))
            assert taken(kept[-1], 1) == [number]
    with closing(encoder.begin(work.chunks(5), work.encode)):
        wait_until(lambda: 5 in work.encoded)


def test_errors_of_a_chunk_or_of_its_source_reach_the_consumer(encoder: Encoder) -> None:
    work = Counted()

    def torn() -> Iterator[tuple[memoryview, ChunkSpan]]:
        yield from work.chunks(1)
        raise ValueError("the trainer is gone")

    def fail(raw: memoryview, span: ChunkSpan) -> EncodedChunk:
        raise ZeroDivisionError

    with closing(encoder.begin(torn(), work.encode)) as encoding, pytest.raises(ValueError, match="gone"):
        list(encoding)
    with closing(encoder.begin(work.chunks(1, 2, 3, 4, 5), fail)) as encoding, pytest.raises(ZeroDivisionError):
        list(encoding)
    with closing(encoder.begin(work.chunks(1, 2, 3, 4, 5), work.encode)) as encoding:
        assert len(list(encoding)) == 5


def test_chunks_in_memory_of_their_own_are_asked_for_as_the_budget_allows() -> None:
    asked, thread = 0, threading.current_thread()

    def chunks() -> Iterator[tuple[memoryview, ChunkSpan]]:
        nonlocal asked
        for number in range(20):
            assert threading.current_thread() is thread
            asked += 1
            yield memoryview(bytes([number])), ChunkSpan(0, 1, "uint8")

    work = Counted()
    for number, chunk in enumerate(encode_stream(chunks(), work.encode)):
        assert chunk.data[0] == number
        assert asked <= number + 1 + AHEAD


def test_chunks_are_handed_over_in_groups() -> None:
    chunks = [(memoryview(b""), ChunkSpan(0, size << 20, "uint8")) for size in (3, 1, 9, 2, 2)]
    found = [([span.bytes >> 20 for _, span in group], size >> 20) for group, size in _groups(chunks)]
    assert found == [([3, 1], 4), ([9], 9), ([2, 2], 4)]


class Machine:
    """A clock, and CPU time that is used at full speed."""

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
