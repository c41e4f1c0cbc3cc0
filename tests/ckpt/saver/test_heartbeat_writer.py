from __future__ import annotations

import threading

import pytest

from ckpt.saver.heartbeat_writer import MOST_BEATS, HeartbeatWriter, Reading, SharedStep, TrainerRun
from ckpt.saver.messages import LocalOnly, TrainerStarted
from ckptstore.codecs.chunk_codecs import Buffer
from ckptstore.commits.heartbeats import read_heartbeats
from ckptstore.errors import StoreUnavailable
from ckptstore.format.records import LOCAL_ONLY, TrainerEnd
from ckptstore.format.records import LocalOnly as StoredLocalOnly
from ckptstore.names import Attempt, new_ulid
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from ckptstore.stores.base import WrappedStore
from tests.support.waiting import wait_until

_T = 1_700_000_000.0


def _began(at: float, parent: str | None = None) -> TrainerStarted:
    return TrainerStarted(id=new_ulid(at), parent=parent, began_at=at - 5, trains_at=at, restored_s=2.0)


def _run(store: Store, now: list[float]) -> Run:
    return Run(store, "gpt", clock=lambda: now[0])


def _begun(run: Run, every_s: float = 3600.0) -> tuple[HeartbeatWriter, SharedStep]:
    """Of a trainer that begins."""
    writer, shared_step = HeartbeatWriter(run, every_s), SharedStep()
    writer.begin(_began(_T), shared_step)
    return writer, shared_step


@pytest.fixture
def now() -> list[float]:
    return [_T]


def test_a_trainer_that_dies_leaves_its_last_step(store: Store, now: list[float]) -> None:
    began, writer, shared_step = _began(_T), HeartbeatWriter(_run(store, now), 3600.0), SharedStep()
    writer.begin(began, shared_step)
    shared_step.write(_T + 10, 3, 0.5, 0.25)
    writer.captured(3, _T + 10.5)
    writer.numbered(7, _T + 10.5)
    shared_step.write(_T + 20, 6, 1.5, 0.5)
    now[0] = _T + 21
    writer.stop(closed=False)
    writer.close()
    (found,) = read_heartbeats(_run(store, now))
    assert (found.id, found.generation, found.ended, found.ended_at) == (began.id, 7, TrainerEnd.DIED, _T + 21)
    assert (found.at, found.step) == ([_T + 10.5, _T + 20], [3, 6])
    assert (found.stalled_s, found.slowed_s) == ([0.5, 1.5], [0.25, 0.5])
    assert (found.began_at, found.trains_at, found.restored_s) == (_T - 5, _T, 2.0)


def test_one_document_per_life_written_again_with_each_beat(store: Store, now: list[float]) -> None:
    run = _run(store, now)
    writer, shared_step = _begun(run, 0.05)
    shared_step.write(_T + 1, 1, 0.0, 0.0)
    wait_until(lambda: [one.step for one in read_heartbeats(run)] == [[1]], "the first beat")
    shared_step.write(_T + 2, 2, 0.0, 0.0)
    wait_until(lambda: [one.step for one in read_heartbeats(run)] == [[1, 2]], "the second")
    parent = str(Attempt(1, new_ulid(_T), generation=1))
    now[0] = _T + 4
    writer.begin(_began(_T + 4, parent), SharedStep())
    wait_until(
        lambda: [one.ended for one in read_heartbeats(run)] == [TrainerEnd.REWOUND, TrainerEnd.NOT], "the second life"
    )
    now[0] = _T + 9
    writer.stop(closed=True)
    now[0] = _T + 12
    writer.close()
    first, second = read_heartbeats(run)
    assert first.ended_at == _T - 1, "when the restore in place began"
    assert (second.parent, second.ended, second.ended_at) == (parent, TrainerEnd.CLOSED, _T + 12)


@pytest.mark.parametrize("ended", [TrainerEnd.REQUESTED, TrainerEnd.ERROR])
def test_why_a_trainer_closes(store: Store, now: list[float], ended: TrainerEnd) -> None:
    writer, shared_step = _begun(_run(store, now))
    shared_step.write_expected_end(ended)
    writer.stop(closed=True)
    writer.close()
    assert [one.ended for one in read_heartbeats(_run(store, now))] == [ended]


@pytest.mark.parametrize("saves", [False, True])
def test_a_short_life_that_closes_has_an_end_if_it_saved(store: Store, now: list[float], saves: bool) -> None:
    for every_s in (60.0, 0.0):
        writer, shared_step = _begun(_run(store, now), every_s)
        writer.captured(1, _T)
        if saves:
            writer.numbered(1, _T)
        writer.stop(closed=True)
        writer.close()
        shared_step.close()  # without heartbeats no writer took it
    assert [one.ended for one in read_heartbeats(_run(store, now))] == [TrainerEnd.CLOSED] * saves


def test_what_is_local_only_is_reported_also_after_the_end_of_the_trainer(store: Store, now: list[float]) -> None:
    run = _run(store, now)
    writer = HeartbeatWriter(run, 0.02)

    def reported() -> tuple[int, float | None] | None:
        found = read_heartbeats(run)
        known = found[-1].extension(LOCAL_ONLY, StoredLocalOnly) if found else None
        return (known.checkpoints, known.since) if known is not None else None

    writer.local_only(LocalOnly(2, 2000, _T))
    writer.begin(_began(_T), SharedStep())
    wait_until(lambda: reported() == (2, _T))
    now[0] = _T + 60
    writer.stop(closed=True)
    writer.finish()
    wait_until(lambda: [one.ended for one in read_heartbeats(run)] == [TrainerEnd.CLOSED])
    writer.local_only(LocalOnly(1, 1000, _T + 1))
    wait_until(lambda: reported() == (1, _T + 1), "a beat of a saver without trainer")
    now[0] = _T + 90
    writer.local_only(LocalOnly(0, 0, None))
    writer.close()
    assert (reported(), read_heartbeats(run)[0].ended_at) == ((0, None), _T + 60)


class _Away(WrappedStore):
    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.back = threading.Event()
        self.tries = 0

    def put(self, key: str, data: Buffer) -> None:
        self.tries += 1
        if self.tries == 1:
            raise StoreUnavailable("away", "wait")
        self.back.wait(60)
        super().put(key, data)


def test_a_store_that_is_away_delays_nothing(now: list[float]) -> None:
    away = _Away(open_store("memory://away"))
    writer, _ = _begun(_run(away, now), 0.02)
    wait_until(lambda: away.tries >= 2, "a beat that failed, and one that hangs")
    writer.captured(1, _T + 1)  # does not wait
    writer.stop(closed=True)
    writer.close()  # waits a second
    away.back.set()


def test_beats_are_thinned_out_and_stay_in_order() -> None:
    life = TrainerRun(_began(_T), SharedStep())
    for number in range(5000):
        life.add(Reading(_T + number, number, number / 2, 0.0, TrainerEnd.CLOSED))
        if number % 7 == 0:
            life.add(Reading(_T + number - 0.5, number - 1, number / 2, 0.0, TrainerEnd.CLOSED))
    assert MOST_BEATS / 2 <= len(life.beats) <= MOST_BEATS
    assert life.beats[-1].step == 4999
    for one, other in zip(life.beats, life.beats[1:], strict=False):
        assert (one.at, one.step, one.stalled_s) <= (other.at, other.step, other.stalled_s)
        assert one.step <= other.step
        assert one.stalled_s <= other.stalled_s


@pytest.mark.parametrize("closed", [True, False])
def test_a_generation_that_begins_after_the_trainer_is_known(store: Store, now: list[float], closed: bool) -> None:
    """On a slow store, the first upload may begin when the trainer is gone."""
    run = _run(store, now)
    writer, shared_step = _begun(run, 0.05)
    shared_step.write(_T + 1, 1, 0.0, 0.0)
    writer.captured(1, _T + 1)
    now[0] = _T + 2
    writer.stop(closed)
    if not closed:
        wait_until(lambda: [one.ended for one in read_heartbeats(run)] == [TrainerEnd.DIED], "the end")
    writer.numbered(3, _T + 1)
    writer.close()
    (found,) = read_heartbeats(run)
    assert found.generation == 3


def test_a_generation_belongs_to_the_life_that_captured_its_save(store: Store, now: list[float]) -> None:
    """A restore in place begins a life while saves of the life before it are still under way."""
    run = _run(store, now)
    writer, _ = _begun(run)
    writer.begin(_began(_T + 10, str(Attempt(1, new_ulid(_T), generation=1))), SharedStep())
    writer.numbered(1, _T + 5)
    writer.numbered(2, _T + 15)
    writer.stop(closed=False)
    writer.close()
    assert [one.generation for one in read_heartbeats(run)] == [1, 2]


def test_a_life_that_ends_before_its_checkpoint_is_replicated_is_written_then(store: Store, now: list[float]) -> None:
    run = _run(store, now)
    writer, shared_step = HeartbeatWriter(run, 3600.0, True), SharedStep()
    writer.begin(_began(_T), shared_step)
    writer.captured(1, _T + 1)
    writer.numbered(1, _T + 1)
    writer.local_only(LocalOnly(1, 10, _T + 1))
    writer.stop(closed=True)
    writer.finish()
    wait_until(lambda: writer._newest is not None, "the end of the life")
    assert read_heartbeats(run) == []
    store.put(run.keys.generation(1), b"{}")
    writer.close()
    assert [found.ended for found in read_heartbeats(run)] == [TrainerEnd.CLOSED]
